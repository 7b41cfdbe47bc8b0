// Stage 4: each thread computes a column of 8 elements of C.
//
//   Was slow:  two shared loads for each multiply-add (Chapter 9 counts one)
//   Change:    a 64x64 block tile, 8 deep; a value of Bs stays in a register for TM = 8 multiply-adds
//   Cost:      8 accumulators a thread; the K tile is 8 deep instead of 32, so four times the barriers
//   Slow now:  TM + 1 shared loads for each TM multiply-adds: nothing is reused along the row
#include "../gemm.cuh"

namespace sgemm::stage4 {

constexpr int BM = 64, BN = 64, BK = 8;
constexpr int TM = 8;
constexpr int THREADS = (BM / TM) * BN;
static_assert(BM * BK == THREADS && BK * BN == THREADS,
              "each of THREADS copies one element of As[BM][BK] and one of Bs[BK][BN]");

template <Edge E>
__global__ __launch_bounds__(THREADS) void kernel(In<E> A, In<E> B, Out<E> C) {
  __shared__ float As[BM][BK];
  __shared__ float Bs[BK][BN];

  const int block_row = blockIdx.y * BM, block_col = blockIdx.x * BN;
  const int thread_row = threadIdx.x / BN * TM, thread_col = threadIdx.x % BN;
  const int a_row = threadIdx.x / BK, a_col = threadIdx.x % BK;
  const int b_row = threadIdx.x / BN, b_col = threadIdx.x % BN;
  float acc[TM] = {};

  for (int k0 = 0; k0 < A.cols; k0 += BK) {
    // global -> shared
    As[a_row][a_col] = A.load(block_row + a_row, k0 + a_col);
    Bs[b_row][b_col] = B.load(k0 + b_row, block_col + b_col);
    __syncthreads();  // nobody computes on a half-filled tile

    // shared -> registers -> acc
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      const float b = Bs[k][thread_col];
      for (int i = 0; i < TM; ++i) acc[i] += As[thread_row + i][k] * b;
    }
    __syncthreads();  // nobody overwrites a tile that others still read
  }

  // registers -> global
  for (int i = 0; i < TM; ++i) C.store(block_row + thread_row + i, block_col + thread_col, acc[i]);
}

cudaError_t launch(const Problem& p, cudaStream_t stream) {
  return launch_tiles<BM, BN, BK>(kernel<Edge::kExact>, kernel<Edge::kGuarded>, dim3(THREADS), p, stream);
}

}  // namespace sgemm::stage4
