// Stage 1: the warp runs along a row.
//
//   Was slow:  the threads of a warp read 32 rows of A: 32 sectors a request, where 128 bytes need 4
//   Change:    threadIdx.x picks the column: B and C take 4 sectors a request, and A one, which all 32 share
//   Cost:      none
//   Slow now:  no reuse: each value is loaded from global memory again by every thread that uses it
#include "../gemm.cuh"

namespace sgemm::stage1 {

constexpr int BM = 32, BN = 32, BK = 1;
constexpr int THREADS = BM * BN;

template <Edge E>
__global__ __launch_bounds__(THREADS) void kernel(In<E> A, In<E> B, Out<E> C) {
  const int row = blockIdx.y * BM + threadIdx.y;
  const int col = blockIdx.x * BN + threadIdx.x;
  float acc = 0.0f;

  // global -> registers -> acc
  for (int k = 0; k < A.cols; ++k) acc += A.load(row, k) * B.load(k, col);

  // registers -> global
  C.store(row, col, acc);
}

cudaError_t launch(const Problem& p, cudaStream_t stream) {
  return launch_tiles<BM, BN, BK>(kernel<Edge::kExact>, kernel<Edge::kGuarded>, dim3(BN, BM), p, stream);
}

}  // namespace sgemm::stage1
