// How fast the multiply-add units are, measured: what a percentage of peak is a percentage of.
#pragma once
#include <cstdint>

#ifdef USE_CUDA
#include <cuda_runtime_api.h>
#endif
#include "host/stream.h"

namespace peaks {

// Each of `count` elements of sink stands for kChains independent chains of dependent multiply-adds,
// `iterations` long: 2 * kChains * iterations FLOP an element. The results go to sink, so that no compiler
// can leave them out.
constexpr int kChains = 12;

#ifdef USE_CUDA
cudaError_t ffma_on_cuda(float* sink, int64_t count, int64_t iterations, cudaStream_t stream);
#endif
void ffma_on_cpu(float* sink, int64_t count, int64_t iterations, simt::Stream& stream);

}  // namespace peaks
