// The tiles' launchers, in the order of TILES.
#pragma once
#include "../kernel.cuh"
#include "../select.h"

#define SGEMM_TILES(X) X(128x256) X(64x128) X(64x64) X(32x128) X(128x32) X(32x32)

namespace sgemm::matmul {

#define SGEMM_DECLARE_TILE(tile)                                                                   \
  cudaError_t tiled_##tile(const Arguments& g, bool a_by_k, bool b_by_k, Access access, dim3 grid, \
                           cudaStream_t stream);
SGEMM_TILES(SGEMM_DECLARE_TILE)
#undef SGEMM_DECLARE_TILE

}  // namespace sgemm::matmul
