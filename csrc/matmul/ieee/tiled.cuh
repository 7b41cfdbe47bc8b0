// The general kernel: stage 10's, grown to every layout, size, alignment and epilogue. A block computes a BM
// x BN tile from BK-deep tiles of A and B, double-buffered in shared memory, both stored along k first,
// As[k][m] and Bs[k][n].
#pragma once
#include "../kernel.cuh"
#include "../select.h"

namespace sgemm::matmul {

template <int BM_, int BN_, int BK_, int WM_, int WN_, int TM_, int TN_, int BLOCKS,
          int RAGGED_BLOCKS = BLOCKS>
struct Tile {
  static constexpr int BM = BM_, BN = BN_, BK = BK_;
  static constexpr int WM = WM_, WN = WN_, TM = TM_, TN = TN_;
  static constexpr int THREADS = (BM / WM) * (BN / WN) * WARP, MIN_BLOCKS = BLOCKS,
                       MIN_RAGGED_BLOCKS = RAGGED_BLOCKS;
  static constexpr int LANES_M = WM / TM, LANES_N = WN / TN;
  static_assert(BM % WM == 0 && BN % WN == 0, "the block tile BM x BN is whole warp tiles WM x WN");
  static_assert(WM % TM == 0 && WN % TN == 0 && LANES_M * LANES_N == WARP, "WM x WN is TM x TN a thread");
  static_assert(TM % 4 == 0 && TN % 4 == 0, "shared memory is read in fours");
  static_assert(BM % 32 == 0 && BN % 32 == 0, "swizzle() stays within a row");
};

// The x-th element of row k of a tile is at to[k][x ^ swizzle(k)]: what a warp turns, eight lines of four
// chunks, is stored to 32 banks, and fours stay fours.
__device__ __forceinline__ constexpr int swizzle(int k) { return k / 4 % 4 * 8; }

// Copies an operand's tiles, BX of its rows or columns (x: m of A, n of B) by BK, to shared memory as
// to[k][x]. Chunks of four run along k (BY_K) and are turned on their way, through registers; or they run
// along x and go by cp.async. What lies outside of the operand, or beyond the part's end, is 0 and not read.
template <int BX, int BK, int THREADS, bool BY_K, Access ACCESS>
class TileCopy {
  static constexpr int CHUNKS = (BY_K ? BK : BX) / 4,
                       LINES = THREADS / CHUNKS;  // of which all threads copy at once
  static constexpr int STEPS = (BY_K ? BX : BK) / LINES;
  static_assert(THREADS % CHUNKS == 0 && STEPS * LINES == (BY_K ? BX : BK),
                "a BX x BK tile is copied in whole steps by THREADS");

 public:
  // x: the tile's first row or column, of `extent`.
  __device__ __forceinline__ TileCopy(const float* data, int64_t stride_x, int64_t stride_k, int x,
                                      int extent, int k_begin)
      : chunk_(threadIdx.x % CHUNKS * 4),
        line_(threadIdx.x / CHUNKS),
        x_left_(extent - x - (BY_K ? line_ : chunk_)),
        stride_(BY_K ? stride_k : stride_x),
        step_((BY_K ? stride_x : stride_k) * LINES),
        advance_((BY_K && ACCESS != Access::kStrided ? 1 : stride_k) * BK),
        from_(data + (x + (BY_K ? line_ : chunk_)) * stride_x +
              (k_begin + (BY_K ? chunk_ : line_)) * stride_k) {}

  // Starts to copy the next tile, of which k_left are left.
  __device__ __forceinline__ void start(float (*to)[BX], int k_left) {
    if constexpr (BY_K) {
      const int left = k_left - chunk_;
#pragma unroll
      for (int n = 0; n < STEPS; ++n) {
        const float* from = from_ + n * step_;
        const int valid = n * LINES < x_left_ ? left : 0;
        if (ACCESS == Access::kVector && valid >= 4) {
          copy4(next_[n], from);
        } else {
          for (int j = 0; j < 4; ++j) next_[n][j] = j < valid ? from[j * stride()] : 0.0f;
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < STEPS; ++n) {
        const int k = line_ + n * LINES;
        const float* from = from_ + n * step_;
        float* chunk = &to[k][chunk_ ^ swizzle(k)];
        const int valid = k < k_left ? x_left_ : 0;
        if constexpr (ACCESS == Access::kVector) {
          copy_async<16>(chunk, from, (valid >= 4 ? 4 : valid > 0 ? valid : 0) * 4);
        } else {
          for (int j = 0; j < 4; ++j) copy_async<4>(chunk + j, from + j * stride(), j < valid ? 4 : 0);
        }
      }
    }
    from_ += advance_;
  }

  // Ends what start() began, but for what cp.async copies.
  __device__ __forceinline__ void finish(float (*to)[BX]) const {
    if constexpr (BY_K) {
#pragma unroll
      for (int n = 0; n < STEPS; ++n)
        for (int j = 0; j < 4; ++j) to[chunk_ + j][(line_ + n * LINES) ^ swizzle(chunk_)] = next_[n][j];
    }
  }

 private:
  __device__ __forceinline__ int64_t stride() const { return ACCESS == Access::kStrided ? stride_ : 1; }

  int chunk_,
      line_;    // where the thread's first chunk begins, and on which line along the other dimension it lies
  int x_left_;  // of the operand, from the chunk on
  int64_t stride_, step_, advance_;  // from element to element, from chunk to chunk, from tile to tile
  const float* from_;
  float next_[BY_K ? STEPS : 1][4];
};

// Where in row k of a tile a lane's `four`-th four is. `first` is where the first would be without swizzle();
// the others are WIDTH, that all lanes take together, apart within the warp tile's W.
template <int W, int WIDTH>
__device__ __forceinline__ int place(int first, int four, int k) {
  constexpr int FOURS =
      (W - 1) & ~(WIDTH - 1);  // the bits that tell fours apart; all others are the lane's and warp's
  return (first ^ (swizzle(k) & ~FOURS)) + (four * WIDTH ^ (swizzle(k) & FOURS));
}

// Multiply-adds, to and fro along the shorter of a and b: each has an operand in common with the last. ptxas
// gives registers and keeps operands for reuse by the source's order, and in this one few read two registers
// of one bank: 5 to 7 in 100 of the 128x256 tile's, where row after row has 13, and 4 % more time.
template <int TM, int TN>
__device__ __forceinline__ void add_outer_product(float (&acc)[TM][TN], const float (&a)[TM],
                                                  const float (&b)[TN]) {
  constexpr bool DOWN = TM <= TN;
#pragma unroll
  for (int n = 0; n < (DOWN ? TN : TM); ++n)
#pragma unroll
    for (int step = 0; step < (DOWN ? TM : TN); ++step) {
      const int m = n % 2 ? (DOWN ? TM : TN) - 1 - step : step;
      const int i = DOWN ? m : n, j = DOWN ? n : m;
      acc[i][j] += a[i] * b[j];
    }
}

template <class T, bool A_BY_K, bool B_BY_K, Access ACCESS>
__global__ __launch_bounds__(T::THREADS, ACCESS == Access::kVector
                                             ? T::MIN_BLOCKS
                                             : T::MIN_RAGGED_BLOCKS) void tiled(Arguments g) {
  constexpr int BM = T::BM, BN = T::BN, BK = T::BK, TM = T::TM, TN = T::TN;
  alignas(16) __shared__ float As[2][BK][BM];
  alignas(16) __shared__ float Bs[2][BK][BN];
  static_assert(sizeof As + sizeof Bs <= MAX_SHARED, "As and Bs have to fit in MAX_SHARED bytes");

  // Blocks in groups of GROUP row tiles, so that those that run together share rows and columns in the L2
  // cache.
  constexpr int GROUP = 8;
  const int tiles_m = (g.M + BM - 1) / BM, tiles_n = (g.N + BN - 1) / BN;
  const int group = blockIdx.x / (GROUP * tiles_n), in_group = blockIdx.x % (GROUP * tiles_n);
  const int first = group * GROUP, height = tiles_m - first < GROUP ? tiles_m - first : GROUP;
  const int block_row = (first + in_group % height) * BM, block_col = in_group / height * BN;

  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int first_row = warp / (BN / T::WN) * T::WM + lane / T::LANES_N * 4;
  const int first_col = warp % (BN / T::WN) * T::WN + lane % T::LANES_N * 4;
  constexpr int WIDTH_M = T::LANES_M * 4, WIDTH_N = T::LANES_N * 4;  // from a lane's four to its next
  float acc[TM][TN] = {};

  // global -> shared
  const Part part = part_of(g);
  TileCopy<BM, BK, T::THREADS, A_BY_K, ACCESS> copy_a(part.A, g.A.row, g.A.col, block_row, g.M, part.k_begin);
  TileCopy<BN, BK, T::THREADS, B_BY_K, ACCESS> copy_b(part.B, g.B.col, g.B.row, block_col, g.N, part.k_begin);
  const auto start_loads = [&](int stage, int k_left) {
    copy_a.start(As[stage], k_left);
    copy_b.start(Bs[stage], k_left);
    copy_commit();
  };
  const auto finish_loads = [&](int stage) {
    copy_a.finish(As[stage]);
    copy_b.finish(Bs[stage]);
    copy_wait<0>();
    __syncthreads();  // everybody's loads have landed, and nobody reads the other stage
  };

  int k_left = part.k_end - part.k_begin;
  start_loads(0, k_left);
  finish_loads(0);
  for (int now = 0; k_left > 0; k_left -= BK, now = 1 - now) {
    if (k_left > BK) start_loads(1 - now, k_left - BK);

    // shared -> registers -> acc
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      float a[TM], b[TN];
      for (int i = 0; i < TM; i += 4) copy4(&a[i], &As[now][k][place<T::WM, WIDTH_M>(first_row, i / 4, k)]);
      for (int j = 0; j < TN; j += 4) copy4(&b[j], &Bs[now][k][place<T::WN, WIDTH_N>(first_col, j / 4, k)]);
      add_outer_product(acc, a, b);
    }
    if (k_left > BK) finish_loads(1 - now);
  }

  // registers -> global
#pragma unroll
  for (int i = 0; i < TM; ++i) {
    const int row = block_row + first_row + i / 4 * WIDTH_M + i % 4;
    if (row >= g.M) continue;
    for (int j = 0; j < TN; j += 4) store4(g, part, row, block_col + first_col + j / 4 * WIDTH_N, &acc[i][j]);
  }
}

// The kernels of one tile: every layout, with LEAST and what asks for less.
template <class T, Access LEAST, Access ACCESS = Access::kVector>
cudaError_t launch_tiled(const Arguments& g, bool a_by_k, bool b_by_k, Access access, dim3 grid,
                         cudaStream_t stream) {
  if (access != ACCESS) {
    if constexpr (ACCESS < LEAST)
      return launch_tiled<T, LEAST, static_cast<Access>(static_cast<int>(ACCESS) + 1)>(g, a_by_k, b_by_k,
                                                                                       access, grid, stream);
    return cudaErrorInvalidValue;
  }
  const auto start = [&](auto kernel) { return launch_kernel(kernel, grid, dim3(T::THREADS), stream, g); };
  if (a_by_k) return start(b_by_k ? tiled<T, true, true, ACCESS> : tiled<T, true, false, ACCESS>);
  return start(b_by_k ? tiled<T, false, true, ACCESS> : tiled<T, false, false, ACCESS>);
}

}  // namespace sgemm::matmul
