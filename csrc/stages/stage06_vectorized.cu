// Stage 6: move 16 bytes per instruction.
//
//   Was slow:  the tiles are copied a float at a time: four times the instructions that the bytes need
//   Change:    float4 loads and stores; As is stored transposed, so that a thread's TM values are adjacent
//   Cost:      the transposing stores hit 16 of the 32 banks; unaligned rows need the guarded kernel
//   Slow now:  every warp's reads spread over the whole block tile
#include "../gemm.cuh"

namespace sgemm::stage6 {

constexpr int BM = 128, BN = 128, BK = 8;
constexpr int TM = 8, TN = 8;
constexpr int THREADS = (BM / TM) * (BN / TN);
constexpr int A_ROWS = THREADS * 4 / BK, B_ROWS = THREADS * 4 / BN;  // that all threads copy at once
static_assert(THREADS * 4 % BK == 0 && THREADS * 4 % BN == 0 && BM % A_ROWS == 0 && BK % B_ROWS == 0,
              "As[BK][BM] and Bs[BK][BN] are copied in whole steps by THREADS");

template <Edge E>
__global__ __launch_bounds__(THREADS) void kernel(In<E> A, In<E> B, Out<E> C) {
  alignas(4 * sizeof(float)) __shared__ float As[BK][BM];
  alignas(4 * sizeof(float)) __shared__ float Bs[BK][BN];

  const int block_row = blockIdx.y * BM, block_col = blockIdx.x * BN;
  const int thread_row = threadIdx.x / (BN / TN) * TM, thread_col = threadIdx.x % (BN / TN) * TN;
  const int a_row = threadIdx.x / (BK / 4), a_col = threadIdx.x % (BK / 4) * 4;
  const int b_row = threadIdx.x / (BN / 4), b_col = threadIdx.x % (BN / 4) * 4;
  float acc[TM][TN] = {};

  for (int k0 = 0; k0 < A.cols; k0 += BK) {
    // global -> shared
    for (int i = 0; i < BM; i += A_ROWS) {
      float a[4];
      A.load4(a, block_row + a_row + i, k0 + a_col);
      for (int k = 0; k < 4; ++k) As[a_col + k][a_row + i] = a[k];
    }
    for (int k = 0; k < BK; k += B_ROWS) B.load4(&Bs[b_row + k][b_col], k0 + b_row + k, block_col + b_col);
    __syncthreads();  // nobody computes on a half-filled tile

    // shared -> registers -> acc
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      float a[TM], b[TN];
      for (int i = 0; i < TM; i += 4) copy4(&a[i], &As[k][thread_row + i]);
      for (int j = 0; j < TN; j += 4) copy4(&b[j], &Bs[k][thread_col + j]);
      for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) acc[i][j] += a[i] * b[j];
    }
    __syncthreads();  // nobody overwrites a tile that others still read
  }

  // registers -> global
  for (int i = 0; i < TM; ++i)
    for (int j = 0; j < TN; j += 4)
      C.store4(block_row + thread_row + i, block_col + thread_col + j, &acc[i][j]);
}

cudaError_t launch(const Problem& p, cudaStream_t stream) {
  return launch_tiles<BM, BN, BK, 4>(kernel<Edge::kExact>, kernel<Edge::kGuarded>, dim3(THREADS), p, stream);
}

}  // namespace sgemm::stage6
