// How fast the hardware is, measured: what a percentage of peak is a percentage of. Every kernel leaves its
// results in sink, so that no compiler can leave out what it computes.
#pragma once
#include <cstdint>

#ifdef USE_CUDA
#include <cuda_runtime_api.h>
#endif
#include "host/stream.h"

namespace peaks {

// FP32 multiply-adds: each element of sink stands for kChains independent chains of dependent ones,
// `iterations` long, that is 2 * kChains * iterations FLOP.
constexpr int kChains = 12;

void ffma_on_cpu(float* sink, int64_t count, int64_t iterations, simt::Stream& stream);

#ifdef USE_CUDA
cudaError_t ffma_on_cuda(float* sink, int64_t count, int iterations, cudaStream_t stream);

// Reads of shared memory: each element of sink stands for `iterations` loads of 16 bytes without bank
// conflicts.
cudaError_t shared_on_cuda(float* sink, int64_t count, int iterations, cudaStream_t stream);

// Reads past the L1 cache: all of data, 4 * elements bytes (a multiple of 16), `iterations` times, by as many
// threads as sink has elements. Data smaller than the L2 cache measures that.
cudaError_t l2_on_cuda(const float* data, int64_t elements, float* sink, int64_t count, int iterations,
                       cudaStream_t stream);
#endif

}  // namespace peaks
