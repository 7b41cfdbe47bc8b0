#include "tiled.cuh"
#include "tiles.h"

namespace sgemm::matmul {

cudaError_t tiled_64x128(const Arguments& g, bool a_by_k, bool b_by_k, Access access, dim3 grid,
                         cudaStream_t stream) {
  return launch_tiled<Tile<64, 128, 16, 32, 64, 8, 8, 3, 4>, Access::kAdjacent>(g, a_by_k, b_by_k, access,
                                                                                grid, stream);
}

}  // namespace sgemm::matmul
