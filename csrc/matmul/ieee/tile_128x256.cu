#include "tiled.cuh"
#include "tiles.h"

namespace sgemm::matmul {

cudaError_t tiled_128x256(const Arguments& g, bool a_by_k, bool b_by_k, Access access, dim3 grid,
                          cudaStream_t stream) {
  return launch_tiled<Tile<128, 256, 16, 64, 64, 8, 16, 1>, Access::kVector>(g, a_by_k, b_by_k, access, grid,
                                                                             stream);
}

}  // namespace sgemm::matmul
