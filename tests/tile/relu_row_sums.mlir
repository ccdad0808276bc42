// Row sums of relu(query key^T), f64: one number for each query, from a product that is never stored.
builtin.module {
  tile.kernel @relu_row_sums(%query : memref<?x24xf64, strided<[?, 1]>>, %key : memref<?x24xf64, strided<[?, 1]>>, %out : memref<?xf64, strided<[1]>>) {
    %c0 = arith.constant 0 : index
    %zero = arith.constant 0.0 : f64
    %queries = tile.dim %query, 0 : memref<?x24xf64, strided<[?, 1]>>
    %keys = tile.dim %key, 0 : memref<?x24xf64, strided<[?, 1]>>
    tile.grid (%q0) to (%queries) step (30) {
      %q = tile.iota %q0 : tensor<30x1xindex>
      %e = tile.iota %c0 : tensor<1x24xindex>
      %query_tile = tile.load %query[%q, %e] : memref<?x24xf64, strided<[?, 1]>>, [tensor<30x1xindex>, tensor<1x24xindex>] -> tensor<30x24xf64>
      %query_staged = tile.stage %query_tile as lhs for task : tensor<30x24xf64> -> tensor<30x24xf64>
      %sum0 = tile.fill %zero : f64 -> tensor<30x1xf64>
      %sum = tile.for %k0 = %c0 to %keys step 64 carry(%sum_old = %sum0) -> (tensor<30x1xf64>) {
        %k = tile.iota %k0 : tensor<64x1xindex>
        %key_tile = tile.load %key[%k, %e] : memref<?x24xf64, strided<[?, 1]>>, [tensor<64x1xindex>, tensor<1x24xindex>] -> tensor<64x24xf64>
        %key_staged = tile.stage %key_tile as rhs for block : tensor<64x24xf64> -> tensor<64x24xf64>
        %scores = tile.dot %query_staged by transposed %key_staged : tensor<30x24xf64>, tensor<64x24xf64> -> tensor<30x64xf64>
        %positive = tile.map (%s = %scores) -> tensor<30x64xf64> {
          %relu = arith.maximumf %s, %zero : f64
          tile.yield %relu : f64
        }
        %block_sum = tile.reduce add %positive : tensor<30x64xf64>
        %sum_new = tile.map (%a = %sum_old, %c = %block_sum) -> tensor<30x1xf64> {
          %total = arith.addf %a, %c : f64
          tile.yield %total : f64
        }
        tile.yield %sum_new : tensor<30x1xf64>
      }
      tile.store %sum, %out[%q] : tensor<30x1xf64>, memref<?xf64, strided<[1]>>, [tensor<30x1xindex>]
      tile.yield
    }
    tile.yield
  }
}
