// The launchers of the ring kernels, in the order of RINGS.
#pragma once
#include "../kernel.cuh"
#include "../select.h"

#define SGEMM_RINGS(X) X(256x128) X(128x128) X(128x64) X(64x64)

namespace sgemm::matmul {

// A and B as the copy engine can copy them, out of their panels where the plan has some. pieces: room for
// those of the tiles that blocks share.
#define SGEMM_DECLARE_RING(tile)                                                              \
  cudaError_t ring_##tile(const Arguments& g, const Plan& plan, int64_t batch, float* pieces, \
                          cudaStream_t stream);
SGEMM_RINGS(SGEMM_DECLARE_RING)
#undef SGEMM_DECLARE_RING

}  // namespace sgemm::matmul
