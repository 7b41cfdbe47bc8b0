// The large kernel, for compute capability 9.0. A producer fills a ring of tiles of A and B in shared memory;
// eight consumer warps do nothing but multiply and add. B's neighbours are along n; what lies otherwise is
// copied to panels first.
#pragma once
#include "../../hopper.cuh"
#include "../kernel.cuh"
#include "../schedule.h"
#include "../select.h"

namespace sgemm::matmul {

// A block tile BM x BN of 64 x 64 warp tiles, 16 x 8 a thread. There are always eight consumer warps: where
// the tile has fewer warp tiles, SLICES warps share each, each with its part of every K tile, and add their
// sums up at last.
template <int BM_, int BN_, int STAGES_>
struct RingTile {
  static constexpr int BM = BM_, BN = BN_, BK = 32, STAGES = STAGES_;
  static constexpr int WM = 64, WN = 64;
  static constexpr int CONSUMERS = 8 * WARP, THREADS = CONSUMERS + 4 * WARP;  // registers go by four warps
  static constexpr int WARPS_M = BM / WM, WARPS_N = BN / WN, SLICES = 8 / (WARPS_M * WARPS_N);
  static constexpr int A_FLOATS = BM * BK, B_FLOATS = BN * BK, STAGE_FLOATS = A_FLOATS + B_FLOATS;
  static constexpr int RING = STAGES * STAGE_FLOATS;
  static constexpr int SUMS = SLICES > 1 ? SLICES * BM * BN : 0;  // lie where the ring does
  static constexpr int FLOATS = RING > SUMS ? RING : SUMS;
  static constexpr int SHARED = 1024 + FLOATS * 4 + (2 * STAGES + 1) * 8;  // bytes
  static_assert(SLICES * WARPS_M * WARPS_N == 8 && BK % (4 * SLICES) == 0);
};

struct RingArguments {
  Arguments g;
  int tiles;             // of all products together
  bool stream;           // as in Schedule
  int a_batch, b_batch;  // 0 where all products have the operand in common, else 1
  float* pieces;         // [piece][BM][BN]
};

// ---- where things lie in a stage, in floats ---------------------------------------------------------------

// An operand by k, [x][BK]. A row is 128 bytes; its chunks of four change places as the copy engine's
// 128-byte swizzle does it, so that neighbouring rows have a k in different banks.
__device__ __forceinline__ constexpr int by_k_index(int x, int k) {
  return x * 32 + ((k / 4 ^ x % 8) * 4 + k % 4);
}
// An operand with neighbours along x, [BK][X].
template <int X>
__device__ __forceinline__ constexpr int by_x_index(int x, int k) {
  return k * X + x;
}

// ---- which tile -------------------------------------------------------------------------------------------

struct Place {
  int batch, row, col;  // the product, and the tile's first row and column
};

// Tiles go in groups of GROUP row tiles, so that those that are computed together share rows and columns in
// the L2 cache.
template <class T>
__device__ __forceinline__ Place place_of(const Arguments& g, int n) {
  constexpr int GROUP = 8;
  const int tiles_m = (g.M + T::BM - 1) / T::BM, tiles_n = (g.N + T::BN - 1) / T::BN;
  const int batch = n / (tiles_m * tiles_n), in_batch = n % (tiles_m * tiles_n);
  const int group = in_batch / (GROUP * tiles_n), in_group = in_batch % (GROUP * tiles_n);
  const int first = group * GROUP, height = tiles_m - first < GROUP ? tiles_m - first : GROUP;
  return {batch, (first + in_group % height) * T::BM, in_group / height * T::BN};
}

// ---- consumers --------------------------------------------------------------------------------------------

__device__ __forceinline__ void load4(float (&to)[4], uint32_t shared) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
               : "r"(shared));
}

// A row's sums: += a * b. An FFMA reads three registers, of two banks, the even and the odd ones; its first
// two operands can be kept from the FFMA before. So a row goes on in the column, and with the b, that the
// last one ended in; and where it turns, the sum has to lie in the other bank than the new a: by k, that
// depends on k. At -O1 (see setup.py), ptxas keeps the source's order; test_register_banks.py counts what it
// makes of it.
template <bool A_BY_K>
__device__ __forceinline__ void add_row(float (&acc)[8], float a, const float (&b)[2][4], int row, int k) {
  constexpr int EVEN_ENDS[] = {0, 1, 3, 5, 7, 2, 4, 6}, ODD_ENDS[] = {1, 0, 2, 4, 6, 3, 5, 7};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int back = 7 - n;
    const int j = !A_BY_K ? row % 2 ? n : back : (k % 2 ? ODD_ENDS : EVEN_ENDS)[row % 2 ? back : n];
    acc[j] += a * b[j / 4][j % 4];
  }
}

// What a consumer thread knows of its place: rows and columns of the block tile, and where they lie in a
// stage.
template <class T, bool A_BY_K>
class Consumer {
 public:
  int slice;

  __device__ __forceinline__ Consumer() {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    slice = __shfl_sync(~0u, warp, 0) / (T::WARPS_M * T::WARPS_N);  // the compiler sees that a warp has one
    first_row_ = warp % T::WARPS_M * T::WM + lane % 4 * (A_BY_K ? 1 : 4);
    first_col_ = warp / T::WARPS_M % T::WARPS_N * T::WN + lane / 4 * 4;
    a_lane_ = (A_BY_K ? by_k_index(first_row_, 0) : by_x_index<T::BM>(first_row_, 0)) * 4;
    b_lane_ = (T::A_FLOATS + by_x_index<T::BN>(first_col_, 0)) * 4;
  }

  // The thread's i-th row as it lies in a stage, and j-th column.
  __device__ __forceinline__ int row(int i) const {
    return first_row_ + i / 4 * 16 + i % 4 * (A_BY_K ? 4 : 1);
  }
  __device__ __forceinline__ int col(int j) const { return first_col_ + j / 4 * 32 + j % 4; }

  // Where a thread's part of four k begins.
  struct Block {
    uint32_t a_even, a_odd, b;
  };
  __device__ __forceinline__ Block block(uint32_t stage, int k) const {
    const uint32_t a = stage + (A_BY_K ? a_lane_ ^ k * 4 : a_lane_ + k * T::BM * 4);
    return {a, a ^ 64, stage + b_lane_ + k * T::BN * 4};
  }
  // Of four rows of the thread, 4m to 4m + 3: by k, the i-th row for all four k; else all rows for the i-th
  // k.
  __device__ __forceinline__ static void load_a(float (&a)[4], const Block& from, int m, int i) {
    load4(a, A_BY_K ? (i % 2 ? from.a_odd : from.a_even) + (m * 16 + i * 4) * 128
                    : from.a_even + by_x_index<T::BM>(m * 16, i) * 4);
  }
  // All columns, for the k-th of the four.
  __device__ __forceinline__ static void load_b(float (&b)[2][4], const Block& from, int k) {
#pragma unroll
    for (int j = 0; j < 2; ++j) load4(b[j], from.b + by_x_index<T::BN>(j * 32, k) * 4);
  }

 private:
  int first_row_, first_col_;
  uint32_t a_lane_, b_lane_;  // bytes from a stage on, for k = 0
};

template <class T>
struct Shared {
  float* ring;
  hopper::Barrier *full, *empty;
  hopper::Barrier* drained;  // of the slices' sums

  __device__ __forceinline__ explicit Shared(char* memory)
      : ring(reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t{1023})),
        full(reinterpret_cast<hopper::Barrier*>(ring + T::FLOATS)),
        empty(full + T::STAGES),
        drained(empty + T::STAGES) {}

  __device__ __forceinline__ void initialise() const {
    for (int s = 0; s < T::STAGES; ++s) {
      hopper::init(&full[s], 1);
      hopper::init(&empty[s], T::CONSUMERS / WARP);
    }
    hopper::init(drained, T::CONSUMERS / WARP);
    hopper::publish_barriers();
  }
};

// A stage of the ring, and the parity of its barriers' phase.
template <int STAGES>
struct Position {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// ---- the producer, a single thread: asks for tiles as stages become empty ---------------------------------

template <class T, bool A_BY_K>
__device__ __forceinline__ void produce(const Shared<T>& shared, const Schedule& schedule,
                                        const CUtensorMap& a, const CUtensorMap& b, const RingArguments& r) {
  const int segments = schedule.segments(blockIdx.x);
  Position<T::STAGES> to;
  for (int n = 0; n < segments; ++n) {
    const Segment segment = schedule.segment(blockIdx.x, n);
    const Place at = place_of<T>(r.g, segment.tile);
    if (T::SLICES > 1 && n > 0) hopper::wait(shared.drained, (n - 1) % 2);
    for (int k_tile = segment.begin; k_tile < segment.end; ++k_tile, to.advance()) {
      const int k = k_tile * T::BK;
      float* const tile = shared.ring + to.stage * T::STAGE_FLOATS;
      hopper::Barrier* const full = &shared.full[to.stage];
      hopper::wait(&shared.empty[to.stage], to.parity ^ 1);
      hopper::arrive_expecting(full, T::STAGE_FLOATS * 4);
      hopper::copy_box(tile, &a, A_BY_K ? k : at.row, A_BY_K ? at.row : k, at.batch * r.a_batch, full);
      hopper::copy_box(tile + T::A_FLOATS, &b, at.col, k, at.batch * r.b_batch, full);
    }
  }
}

// A slice's sums in shared memory, [slice][BM][BN], with chunks of a row that change places so that the lanes
// of a store are in different banks.
template <class T>
__device__ __forceinline__ int sums_index(int slice, int row, int col) {
  return (slice * T::BM + row) * T::BN + (col ^ ((row ^ row / 4) % 4) * 8);
}

template <class T, bool A_BY_K>
__device__ __forceinline__ void consume(const Shared<T>& shared, const Schedule& schedule,
                                        const RingArguments& r) {
  using Me = Consumer<T, A_BY_K>;
  const Me me;
  uint32_t stages = hopper::shared_address(shared.ring);
  asm volatile("" : "+r"(stages));          // keep it, and do not compute it anew in the loop
  constexpr int SHARE = T::BK / T::SLICES;  // of a K tile
  const int first_k = me.slice * SHARE;
  const int segments = schedule.segments(blockIdx.x);
  Position<T::STAGES> from;
  for (int n = 0; n < segments; ++n) {
    const Segment segment = schedule.segment(blockIdx.x, n);
    float acc[4][4][8] = {}, a[4][4], b[4][2][4];
    typename Me::Block now, next;
    // Multiplies four rows, for the k-th of four k. What has been used makes place for four rows of `from`.
    const auto add = [&](int m, int k, const typename Me::Block* from) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        add_row<A_BY_K>(acc[m][i], A_BY_K ? a[i][k] : a[k][i], b[k], i, k);
        if (A_BY_K && k == 3 && from) Me::load_a(a[i], *from, (m + 1) % 4, i);
      }
      if (!A_BY_K && from) Me::load_a(a[k], *from, (m + 1) % 4, k);
    };
    // The first and the other half of four k. The loop's end is between them, where no load is on its way:
    // ptxas puts off loads whose result is first needed in another turn of the loop.
    const auto begin = [&] {
#pragma unroll
      for (int k = 0; k < 4; ++k) add(0, k, &now);
#pragma unroll
      for (int k = 0; k < 3; ++k) add(1, k, nullptr);
    };
    const auto end = [&](const typename Me::Block* then) {
      if (!A_BY_K)
#pragma unroll
        for (int k = 0; k < 3; ++k) Me::load_a(a[k], now, 2, k);
      add(1, 3, &now);
#pragma unroll
      for (int k = 0; k < 4; ++k) add(2, k, &now);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        add(3, k, then);
        if (then) Me::load_b(b[k], *then, k);
      }
    };
    const auto release = [&](int stage) {
      __syncwarp();
      if (threadIdx.x % WARP == 0) hopper::arrive(&shared.empty[stage]);
    };
    int used = 0;
    for (int n_tile = 0; n_tile < segment.end - segment.begin; ++n_tile, used = from.stage, from.advance()) {
      const uint32_t stage = stages + from.stage * T::STAGE_FLOATS * 4;
      hopper::wait(&shared.full[from.stage], from.parity);
      next = me.block(stage, first_k);
      if (n_tile == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) Me::load_a(a[i], next, 0, i), Me::load_b(b[i], next, i);
      } else {
        end(&next);
        release(used);
      }
      now = next;
      begin();
#pragma unroll 1
      for (int k = first_k + 4; k < first_k + SHARE; k += 4) {
        next = me.block(stage, k);
        end(&next);
        now = next;
        begin();
      }
    }
    end(nullptr);
    release(used);

    // A piece goes to its place in the workspace as it is; a tile is scaled and cut at C's edges.
    const bool whole = segment.end - segment.begin == schedule.k_tiles();
    const Place at = whole ? place_of<T>(r.g, segment.tile) : Place{0, 0, 0};
    Arguments to = r.g;
    if (!whole) {
      to.M = T::BM, to.N = T::BN, to.alpha = 1, to.C.data = nullptr, to.vector_out = true;
      to.out = {r.pieces + segment.piece * T::BM * T::BN, 0, T::BN, 1};
    }
    const Part part = part_of(to, at.batch);
    const auto row_of = [&](int row) { return at.row + row; };
    if constexpr (T::SLICES == 1) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int row = row_of(me.row(i));
        if (row >= to.M) continue;
        for (int j = 0; j < 8; j += 4) store4(to, part, row, at.col + me.col(j), &acc[i / 4][i % 4][j]);
      }
    } else {
      const auto everybody = [] { hopper::sync_threads(1, T::CONSUMERS); };
      everybody();  // nobody reads the ring
#pragma unroll
      for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 8; j += 4) {
          float values[4];
          for (int v = 0; v < 4; ++v) values[v] = to.alpha * acc[i / 4][i % 4][j + v];
          copy4(shared.ring + sums_index<T>(me.slice, me.row(i), me.col(j)), values);
        }
      to.alpha = 1;
      everybody();  // all sums are there
      for (int chunk = threadIdx.x; chunk < T::BM * T::BN / 4; chunk += T::CONSUMERS) {
        const int from_row = chunk / (T::BN / 4), col = chunk % (T::BN / 4) * 4, row = row_of(from_row);
        float sum[4] = {};
#pragma unroll
        for (int slice = 0; slice < T::SLICES; ++slice) {
          float values[4];
          copy4(values, shared.ring + sums_index<T>(slice, from_row, col));
          for (int j = 0; j < 4; ++j) sum[j] += values[j];
        }
        if (row < to.M) store4(to, part, row, at.col + col, sum);
      }
      hopper::fence_copies();
      __syncwarp();
      if (threadIdx.x % WARP == 0) hopper::arrive(shared.drained);
    }
  }
}

template <class T, bool A_BY_K>
__global__ __launch_bounds__(T::THREADS, 1) void ring(const __grid_constant__ CUtensorMap a,
                                                      const __grid_constant__ CUtensorMap b,
                                                      const __grid_constant__ RingArguments r) {
#ifdef SGEMM_HOPPER
  extern __shared__ char memory[];
  const Shared<T> shared(memory);
  if (threadIdx.x == 0) shared.initialise();
  __syncthreads();  // the barriers are there
  hopper::let_next_begin();
  hopper::wait_for_previous();  // panels

  const Schedule schedule(r.tiles, (r.g.K + T::BK - 1) / T::BK, gridDim.x, r.stream);
  if (threadIdx.x >= T::CONSUMERS) {
    hopper::give_registers_back<56>();
    if (threadIdx.x == T::CONSUMERS) produce<T, A_BY_K>(shared, schedule, a, b, r);
  } else {
    hopper::take_registers<224>();
    consume<T, A_BY_K>(shared, schedule, r);
  }
#endif
}

constexpr int ADDERS = 256;  // threads

// Adds the pieces of each tile up, from the first K on; a block for each ADDERS chunks of four of a tile (x)
// and each tile that was shared out (y).
template <class T>
__global__ __launch_bounds__(ADDERS) void add_pieces(const __grid_constant__ RingArguments r, int blocks) {
#ifdef SGEMM_HOPPER
  hopper::wait_for_previous();
#endif
  const Schedule schedule(r.tiles, (r.g.K + T::BK - 1) / T::BK, blocks, true);
  const int nth = blockIdx.y, chunk = blockIdx.x * ADDERS + threadIdx.x;
  const int64_t first = schedule.first_piece(nth), last = schedule.last_piece(nth);
  const Place at = place_of<T>(r.g, schedule.shared_tile(nth));
  const int in_row = chunk / (T::BN / 4), in_col = chunk % (T::BN / 4) * 4;
  const int row = at.row + in_row, col = at.col + in_col;
  if (first == last || row >= r.g.M || col >= r.g.N) return;  // the tile was a single block's
  float sum[4] = {};
#pragma unroll 4
  for (int64_t piece = first; piece <= last; ++piece) {
    float values[4];
    copy4(values, r.pieces + (piece * T::BM + in_row) * T::BN + in_col);
    for (int j = 0; j < 4; ++j) sum[j] += values[j];
  }
  store4(r.g, part_of(r.g, at.batch), row, col, sum);
}

// ---- the host's side --------------------------------------------------------------------------------------

// An operand's tensor map, x its other dimension than k, for tiles of X by BK.
template <int X, int BK>
bool box(CUtensorMap* map, const Operand& o, bool by_k, int64_t stride_x, int64_t stride_k, int64_t x,
         int64_t k, int64_t batch) {
  const int64_t products = o.batch == 0 ? 1 : batch;
  return by_k ? hopper::make_tensor_map(map, {o.data, k, x, stride_x, products, o.batch}, BK, X, true)
              : hopper::make_tensor_map(map, {o.data, x, k, stride_k, products, o.batch}, X, BK, false);
}

template <class T>
cudaError_t launch_ring(const Arguments& g, const Plan& plan, int64_t batch, float* pieces,
                        cudaStream_t stream) {
  const Problem p{.batch = batch,
                  .M = g.M,
                  .N = g.N,
                  .K = g.K,
                  .A = g.A,
                  .B = g.B,
                  .C = {},
                  .out = {},
                  .alpha = 1,
                  .beta = 0};
  const Schedule schedule = ring_schedule(T::BM, T::BN, T::BK, p, plan.streamed, plan.blocks);
  const bool a_by_k = RINGS[plan.tile].a_by_k;
  CUtensorMap a, b;
  if (!box<T::BM, T::BK>(&a, g.A, a_by_k, g.A.row, g.A.col, g.M, g.K, batch) ||
      !box<T::BN, T::BK>(&b, g.B, false, g.B.col, g.B.row, g.N, g.K, batch))
    return cudaErrorInvalidValue;
  const RingArguments r{.g = g,
                        .tiles = schedule.tiles(),
                        .stream = plan.streamed,
                        .a_batch = g.A.batch == 0 ? 0 : 1,
                        .b_batch = g.B.batch == 0 ? 0 : 1,
                        .pieces = pieces};
  const auto start = [&](auto kernel) {
    return hopper::launch(kernel, dim3(schedule.blocks()), T::THREADS, T::SHARED,
                          plan.a_panel || plan.b_panel, stream, a, b, r);
  };
  const cudaError_t error = start(a_by_k ? ring<T, true> : ring<T, false>);
  if (error != cudaSuccess || schedule.shared_tiles() == 0) return error;
  const dim3 grid(T::BM * T::BN / 4 / ADDERS, schedule.shared_tiles());
  return hopper::launch(add_pieces<T>, grid, ADDERS, 0, true, stream, r, schedule.blocks());
}

}  // namespace sgemm::matmul
