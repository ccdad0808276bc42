// ((query key^T) value) weight in f16 with f32 sums: two dots in a row inside the loop, and a third on what the loop carried.
builtin.module {
  tile.kernel @chained_dots(%query : memref<?x40xf16, strided<[?, 1]>>, %key : memref<?x40xf16, strided<[?, 1]>>, %value : memref<?x40xf16, strided<[?, 1]>>, %weight : memref<?x16xf16, strided<[?, 1]>>, %scale : f32, %out : memref<?x16xf16, strided<[?, 1]>>) {
    %c0 = arith.constant 0 : index
    %zero = arith.constant 0.0 : f32
    %queries = tile.dim %query, 0 : memref<?x40xf16, strided<[?, 1]>>
    %keys = tile.dim %key, 0 : memref<?x40xf16, strided<[?, 1]>>
    tile.grid (%q0) to (%queries) step (24) {
      %q = tile.iota %q0 : tensor<24x1xindex>
      %e = tile.iota %c0 : tensor<1x40xindex>
      %query_tile = tile.load %query[%q, %e] : memref<?x40xf16, strided<[?, 1]>>, [tensor<24x1xindex>, tensor<1x40xindex>] -> tensor<24x40xf16>
      %query_wide = tile.map (%x = %query_tile) -> tensor<24x40xf32> {
        %y = arith.extf %x : f16 to f32
        tile.yield %y : f32
      }
      %query_staged = tile.stage %query_wide as lhs for task : tensor<24x40xf32> -> tensor<24x40xf32>
      %acc0 = tile.fill %zero : f32 -> tensor<24x40xf32>
      %acc = tile.for %k0 = %c0 to %keys step 48 carry(%acc_old = %acc0) -> (tensor<24x40xf32>) {
        %k = tile.iota %k0 : tensor<48x1xindex>
        %key_tile = tile.load %key[%k, %e] : memref<?x40xf16, strided<[?, 1]>>, [tensor<48x1xindex>, tensor<1x40xindex>] -> tensor<48x40xf16>
        %key_staged = tile.stage %key_tile as rhs for grid : tensor<48x40xf16> -> tensor<48x40xf32>
        %scores = tile.dot %query_staged by transposed %key_staged : tensor<24x40xf32>, tensor<48x40xf32> -> tensor<24x48xf32>
        %value_tile = tile.load %value[%k, %e] : memref<?x40xf16, strided<[?, 1]>>, [tensor<48x1xindex>, tensor<1x40xindex>] -> tensor<48x40xf16>
        %value_staged = tile.stage %value_tile as rhs for grid : tensor<48x40xf16> -> tensor<48x40xf32>
        %acc_new = tile.dot %scores by %value_staged onto %acc_old : tensor<24x48xf32>, tensor<48x40xf32> -> tensor<24x40xf32>
        tile.yield %acc_new : tensor<24x40xf32>
      }
      %e_row = tile.iota %c0 : tensor<40x1xindex>
      %n = tile.iota %c0 : tensor<1x16xindex>
      %weight_tile = tile.load %weight[%e_row, %n] : memref<?x16xf16, strided<[?, 1]>>, [tensor<40x1xindex>, tensor<1x16xindex>] -> tensor<40x16xf16>
      %weight_staged = tile.stage %weight_tile as rhs for grid : tensor<40x16xf16> -> tensor<40x16xf32>
      %product = tile.dot %acc by %weight_staged : tensor<24x40xf32>, tensor<40x16xf32> -> tensor<24x16xf32>
      %result = tile.map (%p = %product) -> tensor<24x16xf16> {
        %scaled = arith.mulf %p, %scale : f32
        %narrow = arith.truncf %scaled : f32 to f16
        tile.yield %narrow : f16
      }
      tile.store %result, %out[%q, %n] : tensor<24x16xf16>, memref<?x16xf16, strided<[?, 1]>>, [tensor<24x1xindex>, tensor<1x16xindex>]
      tile.yield
    }
    tile.yield
  }
}
