// Few rows of C (at most MAX_SKINNY): every element of B is used so few times that the time is that of
// reading it. All of a block's loads go straight to registers, and its warps share K as well as columns, so
// that there is always enough on its way from memory. What threads have summed is added up in shared memory,
// in a fixed order.
#include "skinny.h"

namespace sgemm::matmul {

namespace {

constexpr int WARPS = SKINNY_WARPS, THREADS = WARPS * WARP;

// Four elements of a line, of which `valid` exist. vector: they are neighbours, and aligned.
__device__ __forceinline__ void load_chunk(bool vector, float* to, const float* from, int64_t stride,
                                           int valid) {
  if (vector && valid >= 4) {
    copy4(to, from);
  } else {
    for (int j = 0; j < 4; ++j) to[j] = j < valid ? from[j * stride] : 0.0f;
  }
}

// B is adjacent along k: a warp takes COLUMNS columns, its lanes four k each. `sharing` warps, which divide
// WARPS, take turns along k in the same columns.
template <int ROWS, int COLUMNS, bool VECTOR>
__global__ __launch_bounds__(THREADS) void dot(Arguments g, int sharing, bool a_vector) {
  constexpr int SUMS = ROWS * COLUMNS;
  __shared__ float sums[SUMS][THREADS + 1];  // + 1: a column of it lies in different banks
  __shared__ float warp_sums[SUMS][WARPS];
  const Part part = part_of(g);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int columns_of_block = WARPS / sharing * COLUMNS;
  const int col = blockIdx.x * columns_of_block + warp / sharing * COLUMNS;

  float acc[ROWS][COLUMNS] = {};
#pragma unroll(VECTOR && ROWS * COLUMNS <= 4 ? 2 : 1)
  for (int k = part.k_begin + (warp % sharing * WARP + lane) * 4; k < part.k_end; k += sharing * WARP * 4) {
    float a[ROWS][4], b[COLUMNS][4];
    const int left = part.k_end - k;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
      load_chunk(VECTOR, b[j], part.B + (col + j) * g.B.col + k * g.B.row, g.B.row, col + j < g.N ? left : 0);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      load_chunk(a_vector, a[i], part.A + i * g.A.row + k * g.A.col, g.A.col, i < g.M ? left : 0);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < COLUMNS; ++j)
        for (int n = 0; n < 4; ++n) acc[i][j] += a[i][n] * b[j][n];
  }

#pragma unroll
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < COLUMNS; ++j) sums[i * COLUMNS + j][threadIdx.x] = acc[i][j];
  __syncthreads();  // every lane's sums are there
  for (int n = threadIdx.x; n < SUMS * WARPS; n += THREADS) {
    const float* lanes = &sums[n / WARPS][n % WARPS * WARP];
    float sum = 0.0f;
    for (int l = 0; l < WARP; ++l) sum += lanes[l];
    warp_sums[n / WARPS][n % WARPS] = sum;
  }
  __syncthreads();  // every warp's
  for (int n = threadIdx.x; n < ROWS * columns_of_block; n += THREADS) {
    const int i = n / columns_of_block, j = n % columns_of_block;
    const int to = blockIdx.x * columns_of_block + j;
    if (i >= g.M || to >= g.N) continue;
    const float* warps = &warp_sums[i * COLUMNS + j % COLUMNS][j / COLUMNS * sharing];
    float sum = 0.0f;
    for (int w = 0; w < sharing; ++w) sum += warps[w];
    float value = g.alpha * sum;
    if (part.C != nullptr) value += g.beta * part.C[i * g.C.row + to * g.C.col];
    part.out[i * g.out.row + to * g.out.col] = value;
  }
}

// B is adjacent along n: a lane takes four columns, and the block's warps take turns along k, four at a time.
template <int ROWS, bool VECTOR>
__global__ __launch_bounds__(THREADS) void axpy(Arguments g) {
  constexpr int COLUMNS = WARP * 4;
  alignas(16) __shared__ float sums[WARPS][ROWS][COLUMNS];
  const Part part = part_of(g);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int col = blockIdx.x * COLUMNS + lane * 4, left = g.N - col;

  float acc[ROWS][4] = {};
  for (int k0 = part.k_begin + warp * 4; k0 < part.k_end; k0 += WARPS * 4) {
    float a[ROWS][4], b[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const bool exists = k0 + k < part.k_end;
      load_chunk(VECTOR, b[k], part.B + (k0 + k) * g.B.row + col * g.B.col, g.B.col, exists ? left : 0);
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
        a[i][k] = exists && i < g.M ? part.A[i * g.A.row + (k0 + k) * g.A.col] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < 4; ++j) acc[i][j] += a[i][k] * b[k][j];
  }

#pragma unroll
  for (int i = 0; i < ROWS; ++i) copy4(&sums[warp][i][lane * 4], acc[i]);
  __syncthreads();  // every warp's sums are there
  for (int n = threadIdx.x; n < ROWS * WARP; n += THREADS) {
    const int i = n / WARP, j = n % WARP * 4, to = blockIdx.x * COLUMNS + j;
    if (i >= g.M || to >= g.N) continue;
    float sum[4] = {};
    for (int w = 0; w < WARPS; ++w)
      for (int q = 0; q < 4; ++q) sum[q] += sums[w][i][j + q];
    store4(g, part, i, to, sum);
  }
}

template <int ROWS>
cudaError_t launch_rows(const Arguments& g, const Plan& plan, dim3 grid, cudaStream_t stream) {
  const dim3 block(THREADS);
  const bool vector = plan.access == Access::kVector;
  if (plan.method == Method::kAxpy) {
    grid.x = static_cast<unsigned>(ceil_div(g.N, WARP * 4));
    return launch_kernel(vector ? axpy<ROWS, true> : axpy<ROWS, false>, grid, block, stream, g);
  }
  grid.x = static_cast<unsigned>(ceil_div(g.N, WARPS / plan.sharing * plan.columns));
  const auto start = [&](auto kernel) {
    return launch_kernel(kernel, grid, block, stream, g, plan.sharing, plan.a_vector);
  };
  constexpr int COLUMNS = 4;
  if (plan.columns == COLUMNS) return start(vector ? dot<ROWS, COLUMNS, true> : dot<ROWS, COLUMNS, false>);
  if (plan.columns == 1) return start(vector ? dot<ROWS, 1, true> : dot<ROWS, 1, false>);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_skinny(const Arguments& g, const Plan& plan, dim3 grid, cudaStream_t stream) {
  static_assert(MAX_SKINNY == 8, "the rows below");
  if (g.M <= 1) return launch_rows<1>(g, plan, grid, stream);
  if (g.M <= 2) return launch_rows<2>(g, plan, grid, stream);
  if (g.M <= 4) return launch_rows<4>(g, plan, grid, stream);
  return launch_rows<8>(g, plan, grid, stream);
}

}  // namespace sgemm::matmul
