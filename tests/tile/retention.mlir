// Retention, f32: out[q] = sum over k <= q of decay[h]^(q - k) (query[q] . key[k]) value[k]. Weights without a softmax, nothing to divide by.
builtin.module {
  func.func private @classify(%q0: index, %q1: index, %k0: index, %k1: index, %keys: index) -> i32 {
    %empty = arith.constant 0 : i32
    %full = arith.constant 1 : i32
    %partial = arith.constant 2 : i32
    %none = arith.cmpi slt, %q1, %k0 : index
    %all_causal = arith.cmpi sge, %q0, %k1 : index
    %inside = arith.cmpi slt, %k1, %keys : index
    %all = arith.andi %all_causal, %inside : i1
    %live = arith.select %all, %full, %partial : i32
    %class = arith.select %none, %empty, %live : i32
    func.return %class : i32
  }
  tile.kernel @retention(%query : memref<?x?x?x32xf32, strided<[?, ?, ?, 1]>>, %key : memref<?x?x?x32xf32, strided<[?, ?, ?, 1]>>, %value : memref<?x?x?x48xf32, strided<[?, ?, ?, 1]>>, %decay : memref<?xf32, strided<[1]>>, %out : memref<?x?x?x48xf32, strided<[?, ?, ?, 1]>>) {
    %c0 = arith.constant 0 : index
    %zero = arith.constant 0.0 : f32
    %batch = tile.dim %query, 0 : memref<?x?x?x32xf32, strided<[?, ?, ?, 1]>>
    %heads = tile.dim %query, 1 : memref<?x?x?x32xf32, strided<[?, ?, ?, 1]>>
    %queries = tile.dim %query, 2 : memref<?x?x?x32xf32, strided<[?, ?, ?, 1]>>
    %keys = tile.dim %key, 2 : memref<?x?x?x32xf32, strided<[?, ?, ?, 1]>>
    tile.grid (%b, %h, %q0) to (%batch, %heads, %queries) step (1, 1, 36) descending {
      %q = tile.iota %q0 : tensor<36x1xindex>
      %e = tile.iota %c0 : tensor<1x32xindex>
      %n = tile.iota %c0 : tensor<1x48xindex>
      %query_tile = tile.load %query[%b, %h, %q, %e] : memref<?x?x?x32xf32, strided<[?, ?, ?, 1]>>, [index, index, tensor<36x1xindex>, tensor<1x32xindex>] -> tensor<36x32xf32>
      %query_staged = tile.stage %query_tile as lhs for task : tensor<36x32xf32> -> tensor<36x32xf32>
      %acc0 = tile.fill %zero : f32 -> tensor<36x48xf32>
      %c35 = arith.constant 35 : index
      %q1 = arith.addi %q0, %c35 : index
      %acc = tile.for %k0 = %c0 to %keys step 80 carry(%acc_old = %acc0) -> (tensor<36x48xf32>) {
        %c79 = arith.constant 79 : index
        %k1 = arith.addi %k0, %c79 : index
        %class = tile.classify @classify(%q0, %q1, %k0, %k1, %keys) : index, index, index, index, index
        %next = tile.case %class -> (tensor<36x48xf32>) empty {
          tile.yield %acc_old : tensor<36x48xf32>
        } full, partial {
          %k_row = tile.iota %k0 : tensor<80x1xindex>
          %key_tile = tile.load %key[%b, %h, %k_row, %e] : memref<?x?x?x32xf32, strided<[?, ?, ?, 1]>>, [index, index, tensor<80x1xindex>, tensor<1x32xindex>] -> tensor<80x32xf32>
          %key_staged = tile.stage %key_tile as rhs for grid : tensor<80x32xf32> -> tensor<80x32xf32>
          %scores = tile.dot %query_staged by transposed %key_staged : tensor<36x32xf32>, tensor<80x32xf32> -> tensor<36x80xf32>
          %k = tile.iota %k0 : tensor<1x80xindex>
          %weights = tile.map (%s = %scores, %qi = %q, %ki = %k) -> tensor<36x80xf32> {
            %live = arith.cmpi sge, %qi, %ki : index
            %factor = tile.gather %decay[%h] name "decay" : memref<?xf32, strided<[1]>>
            %distance = arith.subi %qi, %ki : index
            %distance_i32 = arith.index_cast %distance : index to i32
            %distance_f = arith.sitofp %distance_i32 : i32 to f32
            %log = math.log2 %factor : f32
            %exponent = arith.mulf %log, %distance_f : f32
            %power = math.exp2 %exponent : f32
            %weight = arith.mulf %power, %s : f32
            %masked = arith.select %live, %weight, %zero : f32
            tile.yield %masked : f32
          }
          %live_pairs = tile.map (%qi = %q, %ki = %k) -> tensor<36x80xi1> {
            %live = arith.cmpi sge, %qi, %ki : index
            tile.yield %live : i1
          }
          %value_tile = tile.load %value[%b, %h, %k_row, %n] : memref<?x?x?x48xf32, strided<[?, ?, ?, 1]>>, [index, index, tensor<80x1xindex>, tensor<1x48xindex>] -> tensor<80x48xf32>
          %value_staged = tile.stage %value_tile as rhs for grid : tensor<80x48xf32> -> tensor<80x48xf32>
          %acc_new = tile.dot %weights by %value_staged onto %acc_old where %live_pairs : tensor<36x80xf32>, tensor<80x48xf32> -> tensor<36x48xf32>
          tile.yield %acc_new : tensor<36x48xf32>
        }
        tile.yield %next : tensor<36x48xf32>
      }
      tile.store %acc, %out[%b, %h, %q, %n] : tensor<36x48xf32>, memref<?x?x?x48xf32, strided<[?, ?, ?, 1]>>, [index, index, tensor<36x1xindex>, tensor<1x48xindex>]
      tile.yield
    }
    tile.yield
  }
}
