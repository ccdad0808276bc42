// gelu(a b + bias), f32, with all three lengths known only at run time: a loop over the shared one, the activation at its end.
builtin.module {
  tile.kernel @matmul_gelu(%a : memref<?x?xf32, strided<[?, 1]>>, %b : memref<?x?xf32, strided<[?, 1]>>, %bias : memref<?xf32, strided<[1]>>, %out : memref<?x?xf32, strided<[?, 1]>>) {
    %c0 = arith.constant 0 : index
    %zero = arith.constant 0.0 : f32
    %half = arith.constant 0.5 : f32
    %one = arith.constant 1.0 : f32
    %inverse_root = arith.constant 0.707106769 : f32
    %rows = tile.dim %a, 0 : memref<?x?xf32, strided<[?, 1]>>
    %shared = tile.dim %a, 1 : memref<?x?xf32, strided<[?, 1]>>
    %columns = tile.dim %b, 1 : memref<?x?xf32, strided<[?, 1]>>
    tile.grid (%m0, %n0) to (%rows, %columns) step (48, 32) {
      %m = tile.iota %m0 : tensor<48x1xindex>
      %n = tile.iota %n0 : tensor<1x32xindex>
      %acc0 = tile.fill %zero : f32 -> tensor<48x32xf32>
      %acc = tile.for %k0 = %c0 to %shared step 56 carry(%acc_old = %acc0) -> (tensor<48x32xf32>) {
        %k = tile.iota %k0 : tensor<1x56xindex>
        %k_row = tile.iota %k0 : tensor<56x1xindex>
        %a_tile = tile.load %a[%m, %k] : memref<?x?xf32, strided<[?, 1]>>, [tensor<48x1xindex>, tensor<1x56xindex>] -> tensor<48x56xf32>
        %b_tile = tile.load %b[%k_row, %n] : memref<?x?xf32, strided<[?, 1]>>, [tensor<56x1xindex>, tensor<1x32xindex>] -> tensor<56x32xf32>
        %a_staged = tile.stage %a_tile as lhs for block : tensor<48x56xf32> -> tensor<48x56xf32>
        %b_staged = tile.stage %b_tile as rhs for block : tensor<56x32xf32> -> tensor<56x32xf32>
        %acc_new = tile.dot %a_staged by %b_staged onto %acc_old : tensor<48x56xf32>, tensor<56x32xf32> -> tensor<48x32xf32>
        tile.yield %acc_new : tensor<48x32xf32>
      }
      %bias_tile = tile.load %bias[%n] : memref<?xf32, strided<[1]>>, [tensor<1x32xindex>] -> tensor<1x32xf32>
      %result = tile.map (%x = %acc, %c = %bias_tile) -> tensor<48x32xf32> {
        %shifted = arith.addf %x, %c : f32
        %scaled = arith.mulf %shifted, %inverse_root : f32
        %erf = math.erf %scaled : f32
        %above = arith.addf %erf, %one : f32
        %halved = arith.mulf %shifted, %half : f32
        %gelu = arith.mulf %halved, %above : f32
        tile.yield %gelu : f32
      }
      tile.store %result, %out[%m, %n] : tensor<48x32xf32>, memref<?x?xf32, strided<[?, 1]>>, [tensor<48x1xindex>, tensor<1x32xindex>]
      tile.yield
    }
    tile.yield
  }
}
