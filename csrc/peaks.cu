#include <cuda_runtime.h>

#include "peaks.h"

namespace peaks {
namespace {

constexpr int THREADS = 256;

unsigned blocks_for(int64_t count) { return static_cast<unsigned>((count + THREADS - 1) / THREADS); }

__device__ int64_t thread_number() { return int64_t{blockIdx.x} * THREADS + threadIdx.x; }

__device__ float sum(float4 v) { return (v.x + v.y) + (v.z + v.w); }

__global__ __launch_bounds__(THREADS) void ffma(float* sink, int64_t count, int iterations) {
  const int64_t i = thread_number();
  if (i >= count) return;
  // Chains that neither grow nor vanish, from values no compiler knows.
  const float x = 1.0f - sink[i], y = sink[i];
  float chain[kChains];
  for (int c = 0; c < kChains; ++c) chain[c] = y + c;
#pragma unroll 64
  for (int n = 0; n < iterations; ++n)
    for (int c = 0; c < kChains; ++c) chain[c] = chain[c] * x + y;
  float total = 0.0f;
  for (int c = 0; c < kChains; ++c) total += chain[c];
  sink[i] = total;
}

__global__ __launch_bounds__(THREADS) void shared(float* sink, int64_t count, int iterations) {
  constexpr int ROWS = 8;
  __shared__ float4 tile[ROWS][THREADS];
  for (int r = 0; r < ROWS; ++r) tile[r][threadIdx.x] = make_float4(r, r, r, r);
  __syncthreads();
  float total = 0.0f;
#pragma unroll 8
  for (int n = 0; n < iterations; ++n) {
    // volatile twice: the same row comes round again, and neither compiler may keep it.
    float4 v;
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(&tile[n % ROWS][threadIdx.x]))));
    total += sum(v);
  }
  const int64_t i = thread_number();
  if (i < count) sink[i] = total;
}

__global__ __launch_bounds__(THREADS) void l2(const float4* data, int64_t quads, float* sink, int64_t count,
                                              int iterations) {
  const int64_t i = thread_number();
  if (i >= count) return;
  float total = 0.0f;
  for (int n = 0; n < iterations; ++n)
#pragma unroll 8
    for (int64_t q = i; q < quads; q += count) total += sum(__ldcg(data + q));
  sink[i] = total;
}

}  // namespace

cudaError_t ffma_on_cuda(float* sink, int64_t count, int iterations, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  ffma<<<blocks_for(count), THREADS, 0, stream>>>(sink, count, iterations);
  return cudaGetLastError();
}

cudaError_t shared_on_cuda(float* sink, int64_t count, int iterations, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  shared<<<blocks_for(count), THREADS, 0, stream>>>(sink, count, iterations);
  return cudaGetLastError();
}

cudaError_t l2_on_cuda(const float* data, int64_t elements, float* sink, int64_t count, int iterations,
                       cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  l2<<<blocks_for(count), THREADS, 0, stream>>>(reinterpret_cast<const float4*>(data), elements / 4, sink,
                                                count, iterations);
  return cudaGetLastError();
}

}  // namespace peaks
