// Stage 5: each thread computes an 8x8 tile of C, as outer products.
//
//   Was slow:  TM + 1 shared loads for each TM multiply-adds: nothing is reused along the row
//   Change:    for each k, TM values of As and TN of Bs feed TM * TN multiply-adds
//   Cost:      64 accumulators a thread, so two blocks an SM (MIN_BLOCKS: a guarded one would be alone);
//              256 threads copy a 128x128 block's tiles in several steps
//   Slow now:  the tiles are copied a float at a time: four times the instructions that the bytes need
#include "../gemm.cuh"

namespace sgemm::stage5 {

constexpr int BM = 128, BN = 128, BK = 8;
constexpr int TM = 8, TN = 8;
constexpr int THREADS = (BM / TM) * (BN / TN), MIN_BLOCKS = 2;
constexpr int A_ROWS = THREADS / BK, B_ROWS = THREADS / BN;  // that all threads copy at once
static_assert(THREADS % BK == 0 && THREADS % BN == 0 && BM % A_ROWS == 0 && BK % B_ROWS == 0,
              "As[BM][BK] and Bs[BK][BN] are copied in whole steps by THREADS");

template <Edge E>
__global__ __launch_bounds__(THREADS, MIN_BLOCKS) void kernel(In<E> A, In<E> B, Out<E> C) {
  __shared__ float As[BM][BK];
  __shared__ float Bs[BK][BN];

  const int block_row = blockIdx.y * BM, block_col = blockIdx.x * BN;
  const int thread_row = threadIdx.x / (BN / TN) * TM, thread_col = threadIdx.x % (BN / TN) * TN;
  const int a_row = threadIdx.x / BK, a_col = threadIdx.x % BK;
  const unsigned b_row = threadIdx.x / BN, b_col = threadIdx.x % BN;  // an int leaves acc worse registers
  float acc[TM][TN] = {};

  for (int k0 = 0; k0 < A.cols; k0 += BK) {
    // global -> shared
    for (int i = 0; i < BM; i += A_ROWS) As[a_row + i][a_col] = A.load(block_row + a_row + i, k0 + a_col);
    for (int k = 0; k < BK; k += B_ROWS) Bs[b_row + k][b_col] = B.load(k0 + b_row + k, block_col + b_col);
    __syncthreads();  // nobody computes on a half-filled tile

    // shared -> registers -> acc
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      float a[TM], b[TN];
      for (int i = 0; i < TM; ++i) a[i] = As[thread_row + i][k];
      for (int j = 0; j < TN; ++j) b[j] = Bs[k][thread_col + j];
      for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) acc[i][j] += a[i] * b[j];
    }
    __syncthreads();  // nobody overwrites a tile that others still read
  }

  // registers -> global
  for (int i = 0; i < TM; ++i)
    for (int j = 0; j < TN; ++j) C.store(block_row + thread_row + i, block_col + thread_col + j, acc[i][j]);
}

cudaError_t launch(const Problem& p, cudaStream_t stream) {
  return launch_tiles<BM, BN, BK>(kernel<Edge::kExact>, kernel<Edge::kGuarded>, dim3(THREADS), p, stream);
}

}  // namespace sgemm::stage5
