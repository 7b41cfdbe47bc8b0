// Stage 3: each thread computes a 2x2 tile of C in registers.
//
//   Was slow:  two shared loads for each multiply-add (Chapter 9 counts one)
//   Change:    for each k, 2 values of As and 2 of Bs feed 4 multiply-adds: half the loads, not a quarter
//   Cost:      64 threads a block; each copies a 2x2 patch of a tile, so a warp skips every other column
//   Slow now:  shared memory still: one load for each multiply-add as written, and stores in 4-way conflict
#include "../gemm.cuh"

namespace sgemm::stage3 {

constexpr int BM = 16, BN = 16, BK = 16, PAD = 1;
constexpr int TM = 2, TN = 2;
constexpr int MAX_THREADS = 256, MIN_BLOCKS = 4;  // as Chapter 9 has them; the block is (BN / TN) x (BM / TM)
static_assert(BM == BK && BN == BK, "each thread copies TM x TN elements of As[BM][BK] and of Bs[BK][BN]");

template <Edge E>
__global__ __launch_bounds__(MAX_THREADS, MIN_BLOCKS) void kernel(In<E> A, In<E> B, Out<E> C) {
  __shared__ float As[BM][BK + PAD];
  __shared__ float Bs[BK][BN + PAD];

  const int block_row = blockIdx.y * BM, block_col = blockIdx.x * BN;
  const int thread_row = threadIdx.y * TM, thread_col = threadIdx.x * TN;
  float acc[TM][TN] = {};

  for (int k0 = 0; k0 < A.cols; k0 += BK) {
    // global -> shared
    for (int i = 0; i < TM; ++i)
      for (int j = 0; j < TN; ++j) {
        const int tile_row = thread_row + i, tile_col = thread_col + j;
        As[tile_row][tile_col] = A.load(block_row + tile_row, k0 + tile_col);
        Bs[tile_row][tile_col] = B.load(k0 + tile_row, block_col + tile_col);
      }
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
  return launch_tiles<BM, BN, BK>(kernel<Edge::kExact>, kernel<Edge::kGuarded>, dim3(BN / TN, BM / TM), p,
                                  stream);
}

}  // namespace sgemm::stage3
