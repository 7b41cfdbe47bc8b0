#include "panels.h"

namespace sgemm::matmul {

namespace {

constexpr int TILE = 64, THREADS = 256;

int64_t tiles_of(const PanelJob& job) { return ceil_div(job.x, TILE) * ceil_div(job.k, TILE) * job.batch; }

// A block copies TILE by TILE elements, through shared memory if lanes cannot read and write along the same
// dimension.
__global__ __launch_bounds__(THREADS) void panels(PanelJob one, PanelJob other, int tiles_of_one) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  __shared__ float tile[TILE][TILE + 1];
  const bool first = static_cast<int>(blockIdx.x) < tiles_of_one;
  const PanelJob job = first ? one : other;
  const int n = first ? blockIdx.x : blockIdx.x - tiles_of_one;
  const int tiles_x = (job.x + TILE - 1) / TILE, tiles_k = (job.k + TILE - 1) / TILE;
  const int batch = n / (tiles_x * tiles_k), x = n % tiles_x * TILE, k = n / tiles_x % tiles_k * TILE;
  const float* from = job.from + batch * job.from_batch + x * job.from_x + k * job.from_k;
  float* to = job.to + (int64_t{batch} * job.k + k) * job.pitch + x;
  const int x_left = job.x - x, k_left = job.k - k;
  const int lane = threadIdx.x % TILE, line = threadIdx.x / TILE;
  constexpr int LINES = THREADS / TILE;
  const bool along_k = job.from_k < job.from_x;
#pragma unroll
  for (int i = 0; i < TILE / LINES; ++i) {
    const int at_x = along_k ? line + i * LINES : lane, at_k = along_k ? lane : line + i * LINES;
    if (at_x < x_left && at_k < k_left) tile[at_k][at_x] = from[at_x * job.from_x + at_k * job.from_k];
  }
  __syncthreads();  // the tile is there
#pragma unroll
  for (int i = 0; i < TILE / LINES; ++i) {
    const int at_k = line + i * LINES;
    if (lane < x_left && at_k < k_left) to[at_k * job.pitch + lane] = tile[at_k][lane];
  }
}

}  // namespace

cudaError_t copy_panels(const PanelJob& one, const PanelJob& other, cudaStream_t stream) {
  const int64_t tiles = tiles_of(one);
  return launch_kernel(panels, dim3(static_cast<unsigned>(tiles + tiles_of(other))), dim3(THREADS), stream,
                       one, other, static_cast<int>(tiles));
}

}  // namespace sgemm::matmul
