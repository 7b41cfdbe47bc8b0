#include "../peaks.h"

#include <atomic>
#include <stdexcept>
#include <thread>

namespace peaks {
namespace {

typedef float Vector4 __attribute__((vector_size(16)));
typedef float Vector8 __attribute__((vector_size(32)));
typedef float Vector16 __attribute__((vector_size(64)));

// As many elements of sink as Vector has. Twelve chains hide the latency of a multiply-add, and with their
// operands they fit in 16 registers.
template <typename Vector>
__attribute__((always_inline)) inline void chains(float* sink, int64_t iterations) {
  constexpr int LANES = sizeof(Vector) / sizeof(float);
  Vector x, y;
  for (int l = 0; l < LANES; ++l) x[l] = 1.0f - sink[l], y[l] = sink[l];
  Vector chain[kChains];
  for (int c = 0; c < kChains; ++c) chain[c] = y + static_cast<float>(c);
  for (int64_t n = 0; n < iterations; ++n)
    for (int c = 0; c < kChains; ++c) chain[c] = chain[c] * x + y;
  Vector sum = chain[0];
  for (int c = 1; c < kChains; ++c) sum += chain[c];
  for (int l = 0; l < LANES; ++l) sink[l] = sum[l];
}

// The library is built for the oldest processor of its kind; these loops are for the one it runs on.
struct Loop {
  int lanes;
  void (*run)(float* sink, int64_t iterations);
};

#ifdef __x86_64__
__attribute__((target("avx512f"))) void avx512(float* sink, int64_t n) { chains<Vector16>(sink, n); }
__attribute__((target("avx2,fma"))) void avx2(float* sink, int64_t n) { chains<Vector8>(sink, n); }
#endif
void any(float* sink, int64_t n) { chains<Vector4>(sink, n); }

Loop widest() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f")) return {16, avx512};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {8, avx2};
#endif
  return {4, any};
}

}  // namespace

void ffma_on_cpu(float* sink, int64_t count, int64_t iterations, simt::Stream& stream) {
  const Loop loop = widest();
  const auto caller = std::this_thread::get_id();
  std::atomic<int64_t> next{0};
  std::atomic<bool> stopped{false};
  stream.parallel([&] {
    for (int64_t i; !stopped && (i = next.fetch_add(loop.lanes)) + loop.lanes <= count;) {
      loop.run(sink + i, iterations);
      if (std::this_thread::get_id() == caller && stream.interrupted()) stopped = true;
    }
  });
  if (stopped) throw std::runtime_error("interrupted");
}

}  // namespace peaks
