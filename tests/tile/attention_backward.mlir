// Causal attention with ALiBi, f32, head dim 64: the backward pass. Key blocks outside, queries inside, five products.
//
//   p = exp(s - lse)        dV += p^T dO        dP = dO V^T        delta = rowsum(dO * O)
//   dS = p * (dP - delta)   dK += scale dS^T Q  dQ += scale dS K   dslopes[h] += sum dS * (k - q)
//
// A task owns a block of keys of one key/value head and walks over the rows of all its query heads: row r is query r / ratio of head
// kv_head * ratio + r % ratio. dK and dV are carried; dQ and dslopes are sums that tasks share, zero before the call.
builtin.module {
  func.func private @classify(%q0: index, %q1: index, %k0: index, %k1: index, %queries: index, %keys: index) -> i32 {
    %empty = arith.constant 0 : i32
    %full = arith.constant 1 : i32
    %partial = arith.constant 2 : i32
    %none = arith.cmpi slt, %q1, %k0 : index
    %all_causal = arith.cmpi sge, %q0, %k1 : index
    %keys_inside = arith.cmpi slt, %k1, %keys : index
    %queries_inside = arith.cmpi slt, %q1, %queries : index
    %inside = arith.andi %keys_inside, %queries_inside : i1
    %all = arith.andi %all_causal, %inside : i1
    %live = arith.select %all, %full, %partial : i32
    %class = arith.select %none, %empty, %live : i32
    func.return %class : i32
  }
  tile.kernel @attention_backward(%query : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, %key : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, %value : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, %scale : f32, %slopes : memref<?xf32, strided<[1]>>, %out : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, %lse : memref<?x?x?xf32, strided<[?, ?, 1]>>, %d_out : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, %d_query : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, %d_key : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, %d_value : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, %d_slopes : memref<?xf64, strided<[1]>>) {
    %c0 = arith.constant 0 : index
    %zero = arith.constant 0.0 : f32
    %minus_infinity = arith.constant 0xFF800000 : f32
    %log2e = arith.constant 1.44269504 : f32
    %batch = tile.dim %query, 0 : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>
    %heads = tile.dim %query, 1 : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>
    %queries = tile.dim %query, 2 : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>
    %kv_heads = tile.dim %key, 1 : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>
    %keys = tile.dim %key, 2 : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>
    %ratio = arith.divui %heads, %kv_heads : index
    %rows = arith.muli %queries, %ratio : index
    tile.grid (%b, %kv_head, %k0) to (%batch, %kv_heads, %keys) step (1, 1, 96) {
      %h0 = arith.muli %kv_head, %ratio : index
      %c95 = arith.constant 95 : index
      %k1 = arith.addi %k0, %c95 : index
      %e = tile.iota %c0 : tensor<1x64xindex>
      %k = tile.iota %k0 : tensor<1x96xindex>
      %k_row = tile.iota %k0 : tensor<96x1xindex>
      %key_tile = tile.load %key[%b, %kv_head, %k_row, %e] : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, [index, index, tensor<96x1xindex>, tensor<1x64xindex>] -> tensor<96x64xf32>
      %value_tile = tile.load %value[%b, %kv_head, %k_row, %e] : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, [index, index, tensor<96x1xindex>, tensor<1x64xindex>] -> tensor<96x64xf32>
      %key_staged = tile.stage %key_tile as rhs for task : tensor<96x64xf32> -> tensor<96x64xf32>
      %value_staged = tile.stage %value_tile as rhs for task : tensor<96x64xf32> -> tensor<96x64xf32>
      %d_key0 = tile.fill %zero : f32 -> tensor<96x64xf32>
      %d_value0 = tile.fill %zero : f32 -> tensor<96x64xf32>
      %d_key_tile, %d_value_tile = tile.for %m0 = %c0 to %rows step 48 carry(%d_key_old = %d_key0, %d_value_old = %d_value0) -> (tensor<96x64xf32>, tensor<96x64xf32>) {
        %c47 = arith.constant 47 : index
        %m1 = arith.addi %m0, %c47 : index
        %q0 = arith.divui %m0, %ratio : index
        %q1 = arith.divui %m1, %ratio : index
        %class = tile.classify @classify(%q0, %q1, %k0, %k1, %queries, %keys) : index, index, index, index, index, index
        %next:2 = tile.case %class -> (tensor<96x64xf32>, tensor<96x64xf32>) empty {
          tile.yield %d_key_old, %d_value_old : tensor<96x64xf32>, tensor<96x64xf32>
        } full, partial {
          %row = tile.iota %m0 : tensor<48x1xindex>
          %q = tile.map (%r = %row) -> tensor<48x1xindex> {
            %i = arith.divui %r, %ratio : index
            tile.yield %i : index
          }
          %h = tile.map (%r = %row) -> tensor<48x1xindex> {
            %g = arith.remui %r, %ratio : index
            %i = arith.addi %h0, %g : index
            tile.yield %i : index
          }
          %query_tile = tile.load %query[%b, %h, %q, %e] : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, [index, tensor<48x1xindex>, tensor<48x1xindex>, tensor<1x64xindex>] -> tensor<48x64xf32>
          %d_out_tile = tile.load %d_out[%b, %h, %q, %e] : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, [index, tensor<48x1xindex>, tensor<48x1xindex>, tensor<1x64xindex>] -> tensor<48x64xf32>
          %out_tile = tile.load %out[%b, %h, %q, %e] : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, [index, tensor<48x1xindex>, tensor<48x1xindex>, tensor<1x64xindex>] -> tensor<48x64xf32>
          %lse_tile = tile.load %lse[%b, %h, %q] : memref<?x?x?xf32, strided<[?, ?, 1]>>, [index, tensor<48x1xindex>, tensor<48x1xindex>] -> tensor<48x1xf32>
          // The scores again, as in the forward pass.
          %scores = tile.dot %query_tile by transposed %key_staged : tensor<48x64xf32>, tensor<96x64xf32> -> tensor<48x96xf32>
          %modified = tile.case %class -> (tensor<48x96xf32>) empty, full {
            %x = tile.map (%s = %scores, %hi = %h, %qi = %q, %ki = %k) -> tensor<48x96xf32> {
              %natural = arith.mulf %s, %scale : f32
              %slope = tile.gather %slopes[%hi] proven name "slopes" : memref<?xf32, strided<[1]>>
              %q32 = arith.index_cast %qi : index to i32
              %k32 = arith.index_cast %ki : index to i32
              %distance = arith.subi %k32, %q32 : i32
              %distance_f = arith.sitofp %distance : i32 to f32
              %bias = arith.mulf %slope, %distance_f : f32
              %biased = arith.addf %natural, %bias : f32
              tile.yield %biased : f32
            }
            tile.yield %x : tensor<48x96xf32>
          } partial {
            %x = tile.map (%s = %scores, %hi = %h, %qi = %q, %ki = %k) -> tensor<48x96xf32> {
              %causal = arith.cmpi sge, %qi, %ki : index
              %key_inside = arith.cmpi slt, %ki, %keys : index
              %query_inside = arith.cmpi slt, %qi, %queries : index
              %inside = arith.andi %key_inside, %query_inside : i1
              %live = arith.andi %causal, %inside : i1
              %natural = arith.mulf %s, %scale : f32
              %slope = tile.gather %slopes[%hi] where %live name "slopes" : memref<?xf32, strided<[1]>>
              %q32 = arith.index_cast %qi : index to i32
              %k32 = arith.index_cast %ki : index to i32
              %distance = arith.subi %k32, %q32 : i32
              %distance_f = arith.sitofp %distance : i32 to f32
              %bias = arith.mulf %slope, %distance_f : f32
              %biased = arith.addf %natural, %bias : f32
              %masked = arith.select %live, %biased, %minus_infinity : f32
              tile.yield %masked : f32
            }
            tile.yield %x : tensor<48x96xf32>
          }
          %live_pairs = tile.map (%x = %modified) -> tensor<48x96xi1> {
            %alive = arith.cmpf une, %x, %minus_infinity : f32
            tile.yield %alive : i1
          }
          // The weights, already divided by their sum. A dead query has lse = -inf.
          %weights = tile.map (%x = %modified, %l = %lse_tile) -> tensor<48x96xf32> {
            %dead = arith.cmpf oeq, %l, %minus_infinity : f32
            %anchor = arith.select %dead, %zero, %l : f32
            %difference = arith.subf %x, %anchor : f32
            %exponent = arith.mulf %difference, %log2e : f32
            %p = math.exp2 %exponent {attnc.nonpositive} : f32
            tile.yield %p : f32
          }
          %d_value_new = tile.dot transposed %weights by %d_out_tile onto %d_value_old where %live_pairs : tensor<48x96xf32>, tensor<48x64xf32> -> tensor<96x64xf32>
          %d_weights = tile.dot %d_out_tile by transposed %value_staged : tensor<48x64xf32>, tensor<96x64xf32> -> tensor<48x96xf32>
          // Cheap beside the products (one row of E numbers), so it is not worth a buffer and a kernel of its own.
          %out_products = tile.map (%o = %out_tile, %d = %d_out_tile) -> tensor<48x64xf32> {
            %product = arith.mulf %o, %d : f32
            tile.yield %product : f32
          }
          %delta = tile.reduce add %out_products : tensor<48x64xf32>
          %d_modified = tile.map (%p = %weights, %d = %d_weights, %t = %delta, %alive = %live_pairs) -> tensor<48x96xf32> {
            %difference = arith.subf %d, %t : f32
            %product = arith.mulf %p, %difference : f32
            %x = arith.select %alive, %product, %zero : f32
            tile.yield %x : f32
          }
          // Through the score mod: natural score + slopes[h] * (k - q).
          %d_slope_pairs = tile.map (%d = %d_modified, %qi = %q, %ki = %k) -> tensor<48x96xf32> {
            %q32 = arith.index_cast %qi : index to i32
            %k32 = arith.index_cast %ki : index to i32
            %distance = arith.subi %k32, %q32 : i32
            %distance_f = arith.sitofp %distance : i32 to f32
            %product = arith.mulf %d, %distance_f : f32
            tile.yield %product : f32
          }
          %d_slope_rows = tile.reduce add %d_slope_pairs : tensor<48x96xf32>
          tile.accumulate %d_slope_rows into %d_slopes[%h] owners [0, 2] : tensor<48x1xf32>, memref<?xf64, strided<[1]>>, [tensor<48x1xindex>]
          %d_scores = tile.map (%d = %d_modified) -> tensor<48x96xf32> {
            %product = arith.mulf %d, %scale : f32
            tile.yield %product : f32
          }
          %d_key_new = tile.dot transposed %d_scores by %query_tile onto %d_key_old where %live_pairs : tensor<48x96xf32>, tensor<48x64xf32> -> tensor<96x64xf32>
          %d_query_part = tile.dot %d_scores by %key_tile where %live_pairs : tensor<48x96xf32>, tensor<96x64xf32> -> tensor<48x64xf32>
          tile.accumulate %d_query_part into %d_query[%b, %h, %q, %e] owners [2] : tensor<48x64xf32>, memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, [index, tensor<48x1xindex>, tensor<48x1xindex>, tensor<1x64xindex>]
          tile.yield %d_key_new, %d_value_new : tensor<96x64xf32>, tensor<96x64xf32>
        }
        tile.yield %next#0, %next#1 : tensor<96x64xf32>, tensor<96x64xf32>
      }
      tile.store %d_key_tile, %d_key[%b, %kv_head, %k_row, %e] : tensor<96x64xf32>, memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, [index, index, tensor<96x1xindex>, tensor<1x64xindex>]
      tile.store %d_value_tile, %d_value[%b, %kv_head, %k_row, %e] : tensor<96x64xf32>, memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, [index, index, tensor<96x1xindex>, tensor<1x64xindex>]
      tile.yield
    }
    tile.yield
  }
}
