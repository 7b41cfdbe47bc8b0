// Stage 0: one thread computes one element of C.
//
//   Was slow:  -
//   Change:    threadIdx.x picks the row, so the 32 threads of a warp run down a column of C
//   Cost:      two loads for each multiply-add: 0.25 FLOP per byte asked for (both sources say about 1)
//   Slow now:  the threads of a warp read 32 rows of A: 32 sectors a request, where 128 bytes need 4
#include "../gemm.cuh"

namespace sgemm::stage0 {

constexpr int BM = 32, BN = 32, BK = 1;
constexpr int THREADS = BM * BN;

template <Edge E>
__global__ __launch_bounds__(THREADS) void kernel(In<E> A, In<E> B, Out<E> C) {
  const int row = blockIdx.y * BM + threadIdx.x;
  const int col = blockIdx.x * BN + threadIdx.y;
  float acc = 0.0f;

  // global -> registers -> acc
  for (int k = 0; k < A.cols; ++k) acc += A.load(row, k) * B.load(k, col);

  // registers -> global
  C.store(row, col, acc);
}

cudaError_t launch(const Problem& p, cudaStream_t stream) {
  return launch_tiles<BM, BN, BK>(kernel<Edge::kExact>, kernel<Edge::kGuarded>, dim3(BM, BN), p, stream);
}

}  // namespace sgemm::stage0
