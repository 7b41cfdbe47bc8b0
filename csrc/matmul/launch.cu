#include "kernel.cuh"
// The kernels' names first: on the CPU they change the others'.
#include "ieee/tiles.h"
#ifndef SGEMM_HOST
#include "ieee/panels.h"
#include "ieee/rings.h"
#endif
#include "launch.h"
#include "skinny/skinny.h"

namespace sgemm::matmul {

namespace {

constexpr int64_t MAX_BATCH = 65535;  // of a grid's z

constexpr int ADDERS = 8;  // warps, which share the parts of the same elements
constexpr int THREADS = ADDERS * WARP;

// Adds the parts of K up, always in the same order; then alpha, beta and C are due. A lane takes four
// neighbours of a row. parts[part][row][col], rows N long.
template <bool VECTOR>
__global__ __launch_bounds__(THREADS) void add_parts(Arguments g, const float* parts, int64_t parts_batch,
                                                     int64_t parts_split, int splits) {
  alignas(16) __shared__ float sums[ADDERS][WARP][4];
  const int adder = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int chunks = (g.N + 3) / 4, n = blockIdx.x * WARP + lane;
  const int row = n / chunks, col = n % chunks * 4, valid = row < g.M ? g.N - col : 0;
  const Part part = part_of(g);
  const float* from = parts + blockIdx.z * parts_batch + int64_t{row} * g.N + col;
  float sum[4] = {};
#pragma unroll 4
  for (int s = adder; s < splits; s += ADDERS) {
    float values[4];
    if (VECTOR && valid > 0) {
      copy4(values, from + s * parts_split);
    } else {
      for (int j = 0; j < 4; ++j) values[j] = j < valid ? from[s * parts_split + j] : 0.0f;
    }
    for (int j = 0; j < 4; ++j) sum[j] += values[j];
  }
  copy4(sums[adder][lane], sum);
  __syncthreads();  // every adder's sums are there
  if (adder != 0 || valid <= 0) return;
  for (int other = 1; other < ADDERS; ++other)
    for (int j = 0; j < 4; ++j) sum[j] += sums[other][lane][j];
  store4(g, part, row, col, sum);
}

bool aligned(const Result& out, int64_t rows, int64_t batch) {
  return reinterpret_cast<uintptr_t>(out.data) % 16 == 0 && out.col == 1 && (rows == 1 || out.row % 4 == 0) &&
         (batch == 1 || out.batch % 4 == 0);
}

cudaError_t launch_method(const Arguments& g, const Plan& plan, dim3 grid, cudaStream_t stream) {
  if (plan.method != Method::kTiled) return launch_skinny(g, plan, grid, stream);
  const TileInfo& tile = TILES[plan.tile];
  grid.x = static_cast<unsigned>(ceil_div(g.M, tile.BM) * ceil_div(g.N, tile.BN));
  int index = 0;
#define SGEMM_LAUNCH_TILE(name) \
  if (plan.tile == index++) return tiled_##name(g, plan.a_by_k, plan.b_by_k, plan.access, grid, stream);
  SGEMM_TILES(SGEMM_LAUNCH_TILE)
#undef SGEMM_LAUNCH_TILE
  return cudaErrorInvalidValue;
}

cudaError_t launch_ring(const Arguments& all, const Plan& plan, int64_t batch, float* workspace,
                        cudaStream_t stream) {
#ifndef SGEMM_HOST
  // The panels come first in the workspace: they have to be aligned.
  Arguments g = all;
  const auto panel = [&](const Operand& o, int64_t stride_x, int64_t stride_k, int x) {
    const int64_t products = o.batch == 0 ? 1 : batch, pitch = ceil_div(x, 4) * 4;
    const PanelJob job{o.data,    o.batch, stride_x, stride_k, x, g.K, static_cast<int>(products),
                       workspace, pitch};
    workspace += products * g.K * pitch;
    return job;
  };
  PanelJob a{}, b{};
  if (plan.a_panel)
    a = panel(g.A, g.A.row, g.A.col, g.M), g.A = {a.to, g.A.batch == 0 ? 0 : g.K * a.pitch, 1, a.pitch};
  if (plan.b_panel)
    b = panel(g.B, g.B.col, g.B.row, g.N), g.B = {b.to, g.B.batch == 0 ? 0 : g.K * b.pitch, b.pitch, 1};
  if (plan.a_panel || plan.b_panel)
    if (const cudaError_t error = copy_panels(a, b, stream); error != cudaSuccess) return error;
  int index = 0;
#define SGEMM_LAUNCH_RING(name) \
  if (plan.tile / 2 == index++) return ring_##name(g, plan, batch, workspace, stream);
  SGEMM_RINGS(SGEMM_LAUNCH_RING)
#undef SGEMM_LAUNCH_RING
#endif
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch(const Plan& plan, const Problem& problem, float* workspace, cudaStream_t stream) {
  const Problem p = plan.transposed ? problem.transposed() : problem;
  const Arguments all{.A = p.A,
                      .B = p.B,
                      .C = p.C,
                      .out = p.out,
                      .M = static_cast<int>(p.M),
                      .N = static_cast<int>(p.N),
                      .K = static_cast<int>(p.K),
                      .split_k = static_cast<int>(plan.split_k),
                      .out_split = 0,
                      .alpha = p.alpha,
                      .beta = p.beta,
                      .vector_out = aligned(p.out, p.M, p.batch)};
  if (plan.method == Method::kRing) return launch_ring(all, plan, p.batch, workspace, stream);
  for (int64_t first = 0; first < p.batch; first += MAX_BATCH) {
    const int64_t batch = p.batch - first < MAX_BATCH ? p.batch - first : MAX_BATCH;
    Arguments g = all;
    g.A.data += first * p.A.batch;
    g.B.data += first * p.B.batch;
    if (p.C.data != nullptr) g.C.data += first * p.C.batch;
    g.out.data += first * p.out.batch;
    const dim3 grid(1, static_cast<unsigned>(plan.splits), static_cast<unsigned>(batch));

    if (plan.splits == 1) {
      if (const cudaError_t error = launch_method(g, plan, grid, stream); error != cudaSuccess) return error;
      continue;
    }
    Arguments parts = g;
    parts.out = {workspace, p.M * p.N, p.N, 1};
    parts.out_split = batch * p.M * p.N;
    parts.C.data = nullptr;
    parts.alpha = 1;
    parts.vector_out = p.N % 4 == 0;
    if (const cudaError_t error = launch_method(parts, plan, grid, stream); error != cudaSuccess)
      return error;
    const dim3 blocks(static_cast<unsigned>(ceil_div(p.M * ceil_div(p.N, 4), WARP)), 1,
                      static_cast<unsigned>(batch));
    const cudaError_t error =
        launch_kernel(parts.vector_out ? add_parts<true> : add_parts<false>, blocks, dim3(THREADS), stream, g,
                      workspace, parts.out.batch, parts.out_split, plan.splits);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace sgemm::matmul
