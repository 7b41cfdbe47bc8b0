#include <cuda_runtime.h>

#include "peaks.h"

namespace peaks {
namespace {

constexpr int THREADS = 256;

__global__ __launch_bounds__(THREADS) void ffma(float* sink, int64_t count, int iterations) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= count) return;
  // Chains that neither grow nor vanish, from values no compiler knows.
  const float x = 1.0f - sink[i], y = sink[i];
  float chain[kChains];
  for (int c = 0; c < kChains; ++c) chain[c] = y + c;
#pragma unroll 64
  for (int n = 0; n < iterations; ++n)
    for (int c = 0; c < kChains; ++c) chain[c] = chain[c] * x + y;
  float sum = 0.0f;
  for (int c = 0; c < kChains; ++c) sum += chain[c];
  sink[i] = sum;
}

}  // namespace

cudaError_t ffma_on_cuda(float* sink, int64_t count, int64_t iterations, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((count + THREADS - 1) / THREADS);
  ffma<<<blocks, THREADS, 0, stream>>>(sink, count, static_cast<int>(iterations));
  return cudaGetLastError();
}

}  // namespace peaks
