// A row-wise RMS norm and then a product, f32: out = (x / sqrt(mean(x^2) + epsilon) * gain) weight, for any number of columns of weight.
builtin.module {
  tile.kernel @rms_product(%x : memref<?x96xf32, strided<[?, 1]>>, %gain : memref<?xf32, strided<[1]>>, %weight : memref<?x?xf32, strided<[?, 1]>>, %epsilon : f32, %out : memref<?x?xf32, strided<[?, 1]>>) {
    %c0 = arith.constant 0 : index
    %inverse_size = arith.constant 0.010416666666666666 : f32
    %rows = tile.dim %x, 0 : memref<?x96xf32, strided<[?, 1]>>
    %columns = tile.dim %weight, 1 : memref<?x?xf32, strided<[?, 1]>>
    tile.grid (%m0, %n0) to (%rows, %columns) step (42, 64) {
      %m = tile.iota %m0 : tensor<42x1xindex>
      %e = tile.iota %c0 : tensor<1x96xindex>
      %x_tile = tile.load %x[%m, %e] : memref<?x96xf32, strided<[?, 1]>>, [tensor<42x1xindex>, tensor<1x96xindex>] -> tensor<42x96xf32>
      %squares = tile.map (%v = %x_tile) -> tensor<42x96xf32> {
        %square = arith.mulf %v, %v : f32
        tile.yield %square : f32
      }
      %sum = tile.reduce add %squares : tensor<42x96xf32>
      %factor = tile.map (%s = %sum) -> tensor<42x1xf32> {
        %mean = arith.mulf %s, %inverse_size : f32
        %shifted = arith.addf %mean, %epsilon : f32
        %root = math.rsqrt %shifted : f32
        tile.yield %root : f32
      }
      %gain_tile = tile.load %gain[%e] : memref<?xf32, strided<[1]>>, [tensor<1x96xindex>] -> tensor<1x96xf32>
      %normal = tile.map (%v = %x_tile, %f = %factor, %g = %gain_tile) -> tensor<42x96xf32> {
        %scaled = arith.mulf %v, %f : f32
        %gained = arith.mulf %scaled, %g : f32
        tile.yield %gained : f32
      }
      %e_row = tile.iota %c0 : tensor<96x1xindex>
      %n = tile.iota %n0 : tensor<1x64xindex>
      %weight_tile = tile.load %weight[%e_row, %n] : memref<?x?xf32, strided<[?, 1]>>, [tensor<96x1xindex>, tensor<1x64xindex>] -> tensor<96x64xf32>
      %weight_staged = tile.stage %weight_tile as rhs for task : tensor<96x64xf32> -> tensor<96x64xf32>
      %product = tile.dot %normal by %weight_staged : tensor<42x96xf32>, tensor<96x64xf32> -> tensor<42x64xf32>
      tile.store %product, %out[%m, %n] : tensor<42x64xf32>, memref<?x?xf32, strided<[?, 1]>>, [tensor<42x1xindex>, tensor<1x64xindex>]
      tile.yield
    }
    tile.yield
  }
}
