// Causal attention with ALiBi, f32, head dim 64: the forward pass as the CPU runs it.
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
  tile.kernel @attention(%query : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, %key : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, %value : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, %scale : f32, %slopes : memref<?xf32, strided<[1]>>, %out : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, %lse : memref<?x?x?xf32, strided<[?, ?, 1]>>, %group : index) roles ["query", "key", "value", "scale", "capture", "out", "lse", "group"] {
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %zero = arith.constant 0.0 : f32
    %minus_infinity = arith.constant 0xFF800000 : f32
    %log2e = arith.constant 1.44269504 : f32
    %batch = tile.dim %query, 0 : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>
    %heads = tile.dim %query, 1 : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>
    %queries = tile.dim %query, 2 : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>
    %kv_heads = tile.dim %key, 1 : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>
    %keys = tile.dim %key, 2 : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>
    %ratio = arith.divui %heads, %kv_heads : index
    %groups = arith.divui %heads, %group : index
    %rows = arith.muli %queries, %group : index
    %last_row = arith.subi %rows, %c1 : index
    tile.grid (%b, %hg, %m0) to (%batch, %groups, %rows) step (1, 1, 48) descending {
      %h0 = arith.muli %hg, %group : index
      %kv_head = arith.divui %h0, %ratio : index
      %row = tile.iota %m0 : tensor<48x1xindex>
      %q = tile.map (%r = %row) -> tensor<48x1xindex> {
        %i = arith.divui %r, %group : index
        tile.yield %i : index
      }
      %h = tile.map (%r = %row) -> tensor<48x1xindex> {
        %g = arith.remui %r, %group : index
        %i = arith.addi %h0, %g : index
        tile.yield %i : index
      }
      %e = tile.iota %c0 : tensor<1x64xindex>
      %query_tile = tile.load %query[%b, %h, %q, %e] : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, [index, tensor<48x1xindex>, tensor<48x1xindex>, tensor<1x64xindex>] -> tensor<48x64xf32>
      %query_staged = tile.stage %query_tile as lhs for task : tensor<48x64xf32> -> tensor<48x64xf32>
      %max0 = tile.fill %minus_infinity : f32 -> tensor<48x1xf32>
      %sum0 = tile.fill %zero : f32 -> tensor<48x1xf32>
      %acc0 = tile.fill %zero : f32 -> tensor<48x64xf32>
      %c47 = arith.constant 47 : index
      %block_end = arith.addi %m0, %c47 : index
      %m1 = arith.minui %block_end, %last_row : index
      %q0 = arith.divui %m0, %group : index
      %q1 = arith.divui %m1, %group : index
      %max, %sum, %acc = tile.for %k0 = %c0 to %keys step 128 carry(%max_old = %max0, %sum_old = %sum0, %acc_old = %acc0) -> (tensor<48x1xf32>, tensor<48x1xf32>, tensor<48x64xf32>) {
        %c127 = arith.constant 127 : index
        %k1 = arith.addi %k0, %c127 : index
        %class = tile.classify @classify(%q0, %q1, %k0, %k1, %keys) : index, index, index, index, index
        %next:3 = tile.case %class -> (tensor<48x1xf32>, tensor<48x1xf32>, tensor<48x64xf32>) empty {
          tile.yield %max_old, %sum_old, %acc_old : tensor<48x1xf32>, tensor<48x1xf32>, tensor<48x64xf32>
        } full, partial {
          %k_row = tile.iota %k0 : tensor<128x1xindex>
          %key_tile = tile.load %key[%b, %kv_head, %k_row, %e] : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, [index, index, tensor<128x1xindex>, tensor<1x64xindex>] -> tensor<128x64xf32>
          %key_staged = tile.stage %key_tile as rhs for grid : tensor<128x64xf32> -> tensor<128x64xf32>
          %scores = tile.dot %query_staged by transposed %key_staged : tensor<48x64xf32>, tensor<128x64xf32> -> tensor<48x128xf32>
          %k = tile.iota %k0 : tensor<1x128xindex>
          %modified = tile.case %class -> (tensor<48x128xf32>) empty, full {
            %x = tile.map (%s = %scores, %hi = %h, %qi = %q, %ki = %k) -> tensor<48x128xf32> {
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
            tile.yield %x : tensor<48x128xf32>
          } partial {
            %x = tile.map (%s = %scores, %hi = %h, %qi = %q, %ki = %k) -> tensor<48x128xf32> {
              %causal = arith.cmpi sge, %qi, %ki : index
              %inside = arith.cmpi slt, %ki, %keys : index
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
            tile.yield %x : tensor<48x128xf32>
          }
          %block_max = tile.reduce max %modified : tensor<48x128xf32>
          %max_new = tile.map (%a = %max_old, %c = %block_max) -> tensor<48x1xf32> {
            %m = arith.maximumf %a, %c : f32
            tile.yield %m : f32
          }
          %anchor = tile.map (%m = %max_new) -> tensor<48x1xf32> {
            %dead = arith.cmpf oeq, %m, %minus_infinity : f32
            %a = arith.select %dead, %zero, %m : f32
            tile.yield %a : f32
          }
          %rescale = tile.map (%a = %max_old, %m = %anchor) -> tensor<48x1xf32> {
            %difference = arith.subf %a, %m : f32
            %exponent = arith.mulf %difference, %log2e : f32
            %factor = math.exp2 %exponent : f32
            tile.yield %factor : f32
          }
          %live_keys = tile.map (%x = %modified) -> tensor<48x128xi1> {
            %alive = arith.cmpf une, %x, %minus_infinity : f32
            tile.yield %alive : i1
          }
          %weights = tile.map (%x = %modified, %m = %anchor) -> tensor<48x128xf32> {
            %difference = arith.subf %x, %m : f32
            %exponent = arith.mulf %difference, %log2e : f32
            %p = math.exp2 %exponent : f32
            tile.yield %p : f32
          }
          %block_sum = tile.reduce add %weights : tensor<48x128xf32>
          %sum_new = tile.map (%l = %sum_old, %a = %rescale, %s = %block_sum) -> tensor<48x1xf32> {
            %rescaled = arith.mulf %l, %a : f32
            %total = arith.addf %rescaled, %s : f32
            tile.yield %total : f32
          }
          %acc_rescaled = tile.map (%o = %acc_old, %a = %rescale) -> tensor<48x64xf32> {
            %rescaled = arith.mulf %o, %a : f32
            tile.yield %rescaled : f32
          }
          %value_tile = tile.load %value[%b, %kv_head, %k_row, %e] : memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, [index, index, tensor<128x1xindex>, tensor<1x64xindex>] -> tensor<128x64xf32>
          %value_staged = tile.stage %value_tile as rhs for grid : tensor<128x64xf32> -> tensor<128x64xf32>
          %acc_new = tile.dot %weights by %value_staged onto %acc_rescaled where %live_keys : tensor<48x128xf32>, tensor<128x64xf32> -> tensor<48x64xf32>
          tile.yield %max_new, %sum_new, %acc_new : tensor<48x1xf32>, tensor<48x1xf32>, tensor<48x64xf32>
        }
        tile.yield %next#0, %next#1, %next#2 : tensor<48x1xf32>, tensor<48x1xf32>, tensor<48x64xf32>
      }
      %result = tile.map (%o = %acc, %l = %sum) -> tensor<48x64xf32> {
        %none = arith.cmpf oeq, %l, %zero : f32
        %quotient = arith.divf %o, %l : f32
        %r = arith.select %none, %zero, %quotient : f32
        tile.yield %r : f32
      }
      tile.store %result, %out[%b, %h, %q, %e] : tensor<48x64xf32>, memref<?x?x?x64xf32, strided<[?, ?, ?, 1]>>, [index, tensor<48x1xindex>, tensor<48x1xindex>, tensor<1x64xindex>]
      %natural_lse = tile.map (%m = %max, %l = %sum) -> tensor<48x1xf32> {
        %log = math.log %l : f32
        %r = arith.addf %m, %log : f32
        tile.yield %r : f32
      }
      tile.store %natural_lse, %lse[%b, %h, %q] : tensor<48x1xf32>, memref<?x?x?xf32, strided<[?, ?, 1]>>, [index, tensor<48x1xindex>, tensor<48x1xindex>]
      tile.yield
    }
    tile.yield
  }
}
