#include "../peaks.h"

#include <atomic>

// The library is built for the oldest processor of its kind; this loop is for the newest that it meets.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

namespace peaks {
namespace {

// The widest vector there is; a compiler splits it where the processor's are narrower.
constexpr int kLanes = 16;
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));

// kLanes elements of sink.
FOR_EACH_CPU void ffma(float* sink, int64_t iterations) {
  Vector x, y;
  for (int l = 0; l < kLanes; ++l) x[l] = 1.0f - sink[l], y[l] = sink[l];
  Vector chain[kChains];
  for (int c = 0; c < kChains; ++c) chain[c] = y + static_cast<float>(c);
  for (int64_t n = 0; n < iterations; ++n)
    for (int c = 0; c < kChains; ++c) chain[c] = chain[c] * x + y;
  Vector sum = chain[0];
  for (int c = 1; c < kChains; ++c) sum += chain[c];
  for (int l = 0; l < kLanes; ++l) sink[l] = sum[l];
}

}  // namespace

void ffma_on_cpu(float* sink, int64_t count, int64_t iterations, simt::Stream& stream) {
  std::atomic<int64_t> next{0};
  stream.parallel([&] {
    for (int64_t i; (i = next.fetch_add(kLanes)) + kLanes <= count;) ffma(sink + i, iterations);
  });
}

}  // namespace peaks
