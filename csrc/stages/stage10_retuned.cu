// Stage 10: tune it again.
//
//   Was slow:  tile, padding and launch bounds are still those that suited stages 7 and 8
//   Change:    a 128x256 tile, 8x16 a thread; no padding, as 48 KiB hold no more; launch bounds.
//              Beside an edge the tile stays as it was
//   Cost:      one block an SM, whose 8 warps take nearly all of its registers
//   Slow now:  issue slots: instructions that are no multiply-adds, and registers read from one bank
#include "../gemm.cuh"

namespace sgemm::stage10 {

struct Shipped {
  static constexpr int BM = 128, BN = 256, BK = 16, PAD = 0, STAGES = 2;
  static constexpr int WM = 64, WN = 64;
  static constexpr int TM = 8, TN = 16;
  static constexpr int THREADS = (BM / WM) * (BN / WN) * WARP, MIN_BLOCKS = 1;
};

// Beside an edge the tile of stage 9: more warps hide that elements come one by one, and smaller blocks leave
// less of the last wave idle.
struct Ragged {
  static constexpr int BM = 64, BN = 128, BK = 16, PAD = 4, STAGES = 2;
  static constexpr int WM = 32, WN = 64;
  static constexpr int TM = 8, TN = 8;
  static constexpr int THREADS = (BM / WM) * (BN / WN) * WARP, MIN_BLOCKS = 4;
};

template <Edge E, class Tile>
__global__ __launch_bounds__(Tile::THREADS, Tile::MIN_BLOCKS) void kernel(In<E> A, In<E> B, Out<E> C) {
  constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, WM = Tile::WM, WN = Tile::WN;
  constexpr int TM = Tile::TM, TN = Tile::TN, LANES_M = WM / TM, LANES_N = WN / TN;
  constexpr int THREADS = Tile::THREADS, A_ROWS = THREADS * 4 / BK, B_ROWS = THREADS * 4 / BN;
  static_assert(BM % WM == 0 && BN % WN == 0, "the block tile BM x BN is whole warp tiles WM x WN");
  static_assert(WM % TM == 0 && WN % TN == 0 && LANES_M * LANES_N == WARP, "WM x WN is TM x TN a thread");
  static_assert(TM % 4 == 0 && TN % 4 == 0, "the thread tile TM x TN is read in fours");
  static_assert(Tile::PAD % 4 == 0, "rows of As, PAD floats longer, are read in fours");
  static_assert(THREADS * 4 % BK == 0 && THREADS * 4 % BN == 0 && BM % A_ROWS == 0 && BK % B_ROWS == 0,
                "As[BK][BM] and Bs[BK][BN] are copied in whole steps by THREADS");
  alignas(4 * sizeof(float)) __shared__ float As[Tile::STAGES][BK][BM + Tile::PAD];
  alignas(4 * sizeof(float)) __shared__ float Bs[Tile::STAGES][BK][BN];
  static_assert(sizeof As + sizeof Bs <= MAX_SHARED, "As and Bs have to fit in MAX_SHARED bytes");

  const int block_row = blockIdx.y * BM, block_col = blockIdx.x * BN;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int warp_row = warp / (BN / WN) * WM, warp_col = warp % (BN / WN) * WN;
  const auto row = [&](int i) { return warp_row + (i / 4 * LANES_M + lane / LANES_N) * 4 + i % 4; };
  const auto col = [&](int j) { return warp_col + (j / 4 * LANES_N + lane % LANES_N) * 4 + j % 4; };
  const int a_row = threadIdx.x / (BK / 4), a_col = threadIdx.x % (BK / 4) * 4;
  const int b_row = threadIdx.x / (BN / 4), b_col = threadIdx.x % (BN / 4) * 4;
  float acc[TM][TN] = {};

  // global -> shared
  constexpr int A_STEPS = BM / A_ROWS;
  float a_next[A_STEPS][4];  // on their way to As
  const auto start_loads = [&](int stage, int k0) {
    for (int n = 0, i = a_row; n < A_STEPS; ++n, i += A_ROWS) A.load4(a_next[n], block_row + i, k0 + a_col);
    for (int k = 0; k < BK; k += B_ROWS)
      B.copy4_async(&Bs[stage][b_row + k][b_col], k0 + b_row + k, block_col + b_col);
    copy_commit();
  };
  const auto finish_loads = [&](int stage) {
    for (int n = 0, i = a_row; n < A_STEPS; ++n, i += A_ROWS)
      for (int k = 0; k < 4; ++k) As[stage][a_col + k][i] = a_next[n][k];
    copy_wait<0>();
    __syncthreads();  // everybody's loads have landed, and nobody reads the other stage
  };

  start_loads(0, 0);
  finish_loads(0);
  for (int k0 = 0, now = 0; k0 < A.cols; k0 += BK, now = 1 - now) {
    if (k0 + BK < A.cols) start_loads(1 - now, k0 + BK);

    // shared -> registers -> acc
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      float a[TM], b[TN];
      for (int i = 0; i < TM; i += 4) copy4(&a[i], &As[now][k][row(i)]);
      for (int j = 0; j < TN; j += 4) copy4(&b[j], &Bs[now][k][col(j)]);
      for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) acc[i][j] += a[i] * b[j];
    }
    if (k0 + BK < A.cols) finish_loads(1 - now);
  }

  // registers -> global
#pragma unroll
  for (int i = 0; i < TM; ++i)
    for (int j = 0; j < TN; j += 4) C.store4(block_row + row(i), block_col + col(j), &acc[i][j]);
}

template <Edge E, class Tile>
cudaError_t launch(const Problem& p, cudaStream_t stream) {
  return launch_grid<Tile::BM, Tile::BN>(kernel<E, Tile>, dim3(Tile::THREADS), p, stream);
}

cudaError_t launch(const Problem& p, cudaStream_t stream) {
  return covers<Shipped::BM, Shipped::BN, Shipped::BK, 4>(p) ? launch<Edge::kExact, Shipped>(p, stream)
                                                             : launch<Edge::kGuarded, Ragged>(p, stream);
}

}  // namespace sgemm::stage10
