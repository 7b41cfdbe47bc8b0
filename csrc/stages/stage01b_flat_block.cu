// Stage 1b: the same from a flat block.
//
//   Branch of: stage 1
//   Change:    the block is 1-D; / and % find the thread's row and column, as every later stage does
//   Cost:      none: the warps and their addresses are those of stage 1
//   Slow now:  no reuse: each value is loaded from global memory again by every thread that uses it
#include "../gemm.cuh"

namespace sgemm::stage1b {

constexpr int BM = 32, BN = 32, BK = 1;
constexpr int THREADS = BM * BN;

template <Edge E>
__global__ __launch_bounds__(THREADS) void kernel(In<E> A, In<E> B, Out<E> C) {
  const int row = blockIdx.y * BM + threadIdx.x / BN;
  const int col = blockIdx.x * BN + threadIdx.x % BN;
  float acc = 0.0f;

  // global -> registers -> acc
  for (int k = 0; k < A.cols; ++k) acc += A.load(row, k) * B.load(k, col);

  // registers -> global
  C.store(row, col, acc);
}

cudaError_t launch(const Problem& p, cudaStream_t stream) {
  return launch_tiles<BM, BN, BK>(kernel<Edge::kExact>, kernel<Edge::kGuarded>, dim3(THREADS), p, stream);
}

}  // namespace sgemm::stage1b
