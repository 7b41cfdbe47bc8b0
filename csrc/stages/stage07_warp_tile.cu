// Stage 7: each warp owns a rectangle of the block tile.
//
//   Was slow:  every warp's reads spread over the whole block tile
//   Change:    a warp computes WM x WN elements, its threads in runs of 4 rows and columns side by side; the
//              tile is the sweep's
//   Cost:      a third level of tiles; the sweep's is twice as deep, so that four stores collide and not two
//   Slow now:  the transposing stores hit 8 of the 32 banks
#include "../gemm.cuh"

namespace sgemm::stage7 {

struct Shipped {
  static constexpr int BM = 64, BN = 128, BK = 16;
  static constexpr int WM = 32, WN = 64;
  static constexpr int TM = 8, TN = 8;
  static constexpr int THREADS = (BM / WM) * (BN / WN) * WARP;
};

template <Edge E, class Tile>
__global__ __launch_bounds__(Tile::THREADS) void kernel(In<E> A, In<E> B, Out<E> C) {
  constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, WM = Tile::WM, WN = Tile::WN;
  constexpr int TM = Tile::TM, TN = Tile::TN, LANES_M = WM / TM, LANES_N = WN / TN;
  constexpr int THREADS = Tile::THREADS, A_ROWS = THREADS * 4 / BK, B_ROWS = THREADS * 4 / BN;
  static_assert(BM % WM == 0 && BN % WN == 0, "the block tile BM x BN is whole warp tiles WM x WN");
  static_assert(WM % TM == 0 && WN % TN == 0 && LANES_M * LANES_N == WARP, "WM x WN is TM x TN a thread");
  static_assert(TM % 4 == 0 && TN % 4 == 0, "the thread tile TM x TN is read in fours");
  static_assert(THREADS * 4 % BK == 0 && THREADS * 4 % BN == 0 && BM % A_ROWS == 0 && BK % B_ROWS == 0,
                "As[BK][BM] and Bs[BK][BN] are copied in whole steps by THREADS");
  alignas(4 * sizeof(float)) __shared__ float As[BK][BM];
  alignas(4 * sizeof(float)) __shared__ float Bs[BK][BN];
  static_assert(sizeof As + sizeof Bs <= MAX_SHARED, "As and Bs have to fit in MAX_SHARED bytes");

  const int block_row = blockIdx.y * BM, block_col = blockIdx.x * BN;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int warp_row = warp / (BN / WN) * WM, warp_col = warp % (BN / WN) * WN;
  const auto row = [&](int i) { return warp_row + (i / 4 * LANES_M + lane / LANES_N) * 4 + i % 4; };
  const auto col = [&](int j) { return warp_col + (j / 4 * LANES_N + lane % LANES_N) * 4 + j % 4; };
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
      for (int i = 0; i < TM; i += 4) copy4(&a[i], &As[k][row(i)]);
      for (int j = 0; j < TN; j += 4) copy4(&b[j], &Bs[k][col(j)]);
      for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) acc[i][j] += a[i] * b[j];
    }
    __syncthreads();  // nobody overwrites a tile that others still read
  }

  // registers -> global
  for (int i = 0; i < TM; ++i)
    for (int j = 0; j < TN; j += 4) C.store4(block_row + row(i), block_col + col(j), &acc[i][j]);
}

cudaError_t launch(const Problem& p, cudaStream_t stream) {
  return launch_tiles<Shipped::BM, Shipped::BN, Shipped::BK, 4>(
      kernel<Edge::kExact, Shipped>, kernel<Edge::kGuarded, Shipped>, dim3(Shipped::THREADS), p, stream);
}

}  // namespace sgemm::stage7
