// The general kernel: stage 10's, grown to every layout, size, alignment and epilogue. A block computes a BM x BN tile
// from BK-deep tiles of A and B, double-buffered in shared memory, both stored along k first, As[k][m] and Bs[k][n].
#pragma once
#include "../kernel.cuh"

namespace sgemm::matmul {

template <int BM_, int BN_, int BK_, int WM_, int WN_, int TM_, int TN_, int PAD_, int MIN_BLOCKS_>
struct Tile {
  static constexpr int BM = BM_, BN = BN_, BK = BK_, PAD = PAD_;
  static constexpr int WM = WM_, WN = WN_, TM = TM_, TN = TN_;
  static constexpr int THREADS = (BM / WM) * (BN / WN) * WARP, MIN_BLOCKS = MIN_BLOCKS_;
  static constexpr int LANES_M = WM / TM, LANES_N = WN / TN;
  static_assert(BM % WM == 0 && BN % WN == 0, "the block tile BM x BN is whole warp tiles WM x WN");
  static_assert(WM % TM == 0 && WN % TN == 0 && LANES_M * LANES_N == WARP, "WM x WN is TM x TN a thread");
  static_assert(TM % 4 == 0 && TN % 4 == 0 && PAD % 4 == 0, "shared memory is read in fours");
};

// Copies an operand's tiles, BX of its rows or columns (x: m of A, n of B) by BK, to shared memory as to[k][x].
// Chunks of four run along k (BY_K) and are turned on their way, through registers; or they run along x and go by
// cp.async. VECTOR: a chunk is 16 aligned bytes; else its elements come one by one, any stride apart. What lies
// outside of the operand, or beyond the part's end, is 0 and not read.
template <int BX, int BK, int PITCH, int THREADS, bool BY_K, bool VECTOR>
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
        advance_(stride_k * BK),
        from_(data + (x + (BY_K ? line_ : chunk_)) * stride_x +
              (k_begin + (BY_K ? chunk_ : line_)) * stride_k) {}

  // Starts to copy the next tile, of which k_left are left.
  __device__ __forceinline__ void start(float (*to)[PITCH], int k_left) {
    if constexpr (BY_K) {
      const int left = k_left - chunk_;
#pragma unroll
      for (int n = 0; n < STEPS; ++n) {
        const float* from = from_ + n * step_;
        const int valid = n * LINES < x_left_ ? left : 0;
        if (VECTOR && valid >= 4) {
          copy4(next_[n], from);
        } else {
          for (int j = 0; j < 4; ++j) next_[n][j] = j < valid ? from[VECTOR ? j : j * stride_] : 0.0f;
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < STEPS; ++n) {
        const int k = line_ + n * LINES;
        const float* from = from_ + n * step_;
        const int valid = k < k_left ? x_left_ : 0;
        if constexpr (VECTOR) {
          copy_async<16>(&to[k][chunk_], from, (valid >= 4 ? 4 : valid > 0 ? valid : 0) * 4);
        } else {
          for (int j = 0; j < 4; ++j)
            copy_async<4>(&to[k][chunk_ + j], from + j * stride_, j < valid ? 4 : 0);
        }
      }
    }
    from_ += advance_;
  }

  // Ends what start() began, but for what cp.async copies.
  __device__ __forceinline__ void finish(float (*to)[PITCH]) const {
    if constexpr (BY_K) {
#pragma unroll
      for (int n = 0; n < STEPS; ++n)
        for (int j = 0; j < 4; ++j) to[chunk_ + j][line_ + n * LINES] = next_[n][j];
    }
  }

 private:
  int chunk_,
      line_;    // where the thread's first chunk begins, and on which line along the other dimension it lies
  int x_left_;  // of the operand, from the chunk on
  int64_t stride_, step_, advance_;  // from element to element, from chunk to chunk, from tile to tile
  const float* from_;
  float next_[BY_K ? STEPS : 1][4];
};

template <class T, bool A_BY_K, bool B_BY_K, bool VECTOR>
__global__ __launch_bounds__(T::THREADS, T::MIN_BLOCKS) void tiled(Arguments g) {
  constexpr int BM = T::BM, BN = T::BN, BK = T::BK, TM = T::TM, TN = T::TN;
  alignas(16) __shared__ float As[2][BK][BM + T::PAD];
  alignas(16) __shared__ float Bs[2][BK][BN + T::PAD];
  static_assert(sizeof As + sizeof Bs <= MAX_SHARED, "As and Bs have to fit in MAX_SHARED bytes");

  // Blocks in groups of GROUP row tiles, so that those that run together share rows and columns in the L2 cache.
  constexpr int GROUP = 8;
  const int tiles_m = (g.M + BM - 1) / BM, tiles_n = (g.N + BN - 1) / BN;
  const int group = blockIdx.x / (GROUP * tiles_n), in_group = blockIdx.x % (GROUP * tiles_n);
  const int first = group * GROUP, height = tiles_m - first < GROUP ? tiles_m - first : GROUP;
  const int block_row = (first + in_group % height) * BM, block_col = in_group / height * BN;

  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int warp_row = warp / (BN / T::WN) * T::WM, warp_col = warp % (BN / T::WN) * T::WN;
  const auto row = [&](int i) { return warp_row + (i / 4 * T::LANES_M + lane / T::LANES_N) * 4 + i % 4; };
  const auto col = [&](int j) { return warp_col + (j / 4 * T::LANES_N + lane % T::LANES_N) * 4 + j % 4; };
  float acc[TM][TN] = {};

  // global -> shared
  const Part part = part_of(g);
  TileCopy<BM, BK, BM + T::PAD, T::THREADS, A_BY_K, VECTOR> copy_a(part.A, g.A.row, g.A.col, block_row, g.M,
                                                                   part.k_begin);
  TileCopy<BN, BK, BN + T::PAD, T::THREADS, B_BY_K, VECTOR> copy_b(part.B, g.B.col, g.B.row, block_col, g.N,
                                                                   part.k_begin);
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
      for (int i = 0; i < TM; i += 4) copy4(&a[i], &As[now][k][row(i)]);
      for (int j = 0; j < TN; j += 4) copy4(&b[j], &Bs[now][k][col(j)]);
      for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) acc[i][j] += a[i] * b[j];
    }
    if (k_left > BK) finish_loads(1 - now);
  }

  // registers -> global
#pragma unroll
  for (int i = 0; i < TM; ++i) {
    if (block_row + row(i) >= g.M) continue;
    for (int j = 0; j < TN; j += 4) store4(g, part, block_row + row(i), block_col + col(j), &acc[i][j]);
  }
}

// The kernels of one tile: every layout, with aligned chunks and, if the tile is RAGGED, any others.
template <class T, bool RAGGED>
cudaError_t launch_tiled(const Arguments& g, bool a_by_k, bool b_by_k, bool vector, dim3 grid,
                         cudaStream_t stream) {
  const auto start = [&](auto kernel) { return launch_kernel(kernel, grid, dim3(T::THREADS), stream, g); };
  if (vector) {
    if (a_by_k) return start(b_by_k ? tiled<T, true, true, true> : tiled<T, true, false, true>);
    return start(b_by_k ? tiled<T, false, true, true> : tiled<T, false, false, true>);
  }
  if constexpr (RAGGED) {
    if (a_by_k) return start(b_by_k ? tiled<T, true, true, false> : tiled<T, true, false, false>);
    return start(b_by_k ? tiled<T, false, true, false> : tiled<T, false, false, false>);
  }
  return cudaErrorInvalidValue;
}

}  // namespace sgemm::matmul
