// Stage 2: a block shares its tiles of A and B.
//
//   Was slow:  no reuse: each value is loaded from global memory again by every thread that uses it
//   Change:    the block copies a 16x16 tile of A and of B into shared memory: one load feeds 16 threads
//   Cost:      two barriers a K tile; 2,176 bytes of shared memory, padded as Chapter 9 asks
//   Slow now:  two shared loads for each multiply-add (Chapter 9 counts one)
#include "../gemm.cuh"

namespace sgemm::stage2 {

constexpr int BM = 16, BN = 16, BK = 16, PAD = 1;
constexpr int THREADS = BM * BN;
static_assert(BM == BK && BN == BK, "each thread copies one element of As[BM][BK] and one of Bs[BK][BN]");

template <Edge E>
__global__ __launch_bounds__(THREADS) void kernel(In<E> A, In<E> B, Out<E> C) {
  __shared__ float As[BM][BK + PAD];
  __shared__ float Bs[BK][BN + PAD];

  const int block_row = blockIdx.y * BM, block_col = blockIdx.x * BN;
  const int thread_row = threadIdx.y, thread_col = threadIdx.x;
  float acc = 0.0f;

  for (int k0 = 0; k0 < A.cols; k0 += BK) {
    // global -> shared
    As[thread_row][thread_col] = A.load(block_row + thread_row, k0 + thread_col);
    Bs[thread_row][thread_col] = B.load(k0 + thread_row, block_col + thread_col);
    __syncthreads();  // nobody computes on a half-filled tile

    // shared -> registers -> acc
#pragma unroll
    for (int k = 0; k < BK; ++k) acc += As[thread_row][k] * Bs[k][thread_col];
    __syncthreads();  // nobody overwrites a tile that others still read
  }

  // registers -> global
  C.store(block_row + thread_row, block_col + thread_col, acc);
}

cudaError_t launch(const Problem& p, cudaStream_t stream) {
  return launch_tiles<BM, BN, BK>(kernel<Edge::kExact>, kernel<Edge::kGuarded>, dim3(BN, BM), p, stream);
}

}  // namespace sgemm::stage2
