#include "tiled.cuh"
#include "tiles.h"

namespace sgemm::matmul {

cudaError_t tiled_64x64(const Arguments& g, bool a_by_k, bool b_by_k, Access access, dim3 grid,
                        cudaStream_t stream) {
  return launch_tiled<Tile<64, 64, 16, 32, 32, 8, 4, 5>, Access::kStrided>(g, a_by_k, b_by_k, access, grid,
                                                                           stream);
}

}  // namespace sgemm::matmul
