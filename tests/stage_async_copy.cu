// A stage for test_sanitize.py: two tiles in shared memory, and cp.async fills one while the other is used.
//
// Not on the ladder: it is here to show that the CPU executor finds what can go wrong with cp.async, as
// nothing on the ladder uses it yet.
#include "../gemm.cuh"

namespace sgemm::async_copy {

constexpr int BM = 16, BN = 16, BK = 16, STAGES = 2;
constexpr int THREADS = BM * BN;
static_assert(BM == BK && BN == BK, "each thread copies one element of As[BM][BK] and one of Bs[BK][BN]");

template <Edge E>
__global__ __launch_bounds__(THREADS) void kernel(In<E> A, In<E> B, Out<E> C) {
  __shared__ float As[STAGES][BM][BK];
  __shared__ float Bs[STAGES][BK][BN];

  const int block_row = blockIdx.y * BM, block_col = blockIdx.x * BN;
  const int thread_row = threadIdx.y, thread_col = threadIdx.x;
  float acc = 0.0f;

  // global -> shared: the first tile
  A.copy_async(&As[0][thread_row][thread_col], block_row + thread_row, thread_col);
  B.copy_async(&Bs[0][thread_row][thread_col], thread_row, block_col + thread_col);
  copy_commit();

  for (int k0 = 0, now = 0; k0 < A.cols; k0 += BK, now = 1 - now) {
    copy_wait<0>();
    __syncthreads();  // everybody's copies have landed, and nobody reads the other tile

    // global -> shared: the next tile
    const int next = 1 - now, next_k0 = k0 + BK;
    if (next_k0 < A.cols) {
      A.copy_async(&As[next][thread_row][thread_col], block_row + thread_row, next_k0 + thread_col);
      B.copy_async(&Bs[next][thread_row][thread_col], next_k0 + thread_row, block_col + thread_col);
    }
    copy_commit();

    // shared -> registers -> acc
#pragma unroll
    for (int k = 0; k < BK; ++k) acc += As[now][thread_row][k] * Bs[now][k][thread_col];
  }

  // registers -> global
  C.store(block_row + thread_row, block_col + thread_col, acc);
}

cudaError_t launch(const Problem& p, cudaStream_t stream) {
  return launch_tiles<BM, BN, BK>(kernel<Edge::kExact>, kernel<Edge::kGuarded>, dim3(BN, BM), p, stream);
}

}  // namespace sgemm::async_copy
