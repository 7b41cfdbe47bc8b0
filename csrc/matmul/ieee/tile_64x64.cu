#include "tiled.cuh"
#include "tiles.h"

namespace sgemm::matmul {

cudaError_t tiled_64x64(const Arguments& g, bool a_by_k, bool b_by_k, bool vector, dim3 grid,
                        cudaStream_t stream) {
  return launch_tiled<Tile<64, 64, 16, 32, 32, 8, 4, 4, 5>, true>(g, a_by_k, b_by_k, vector, grid, stream);
}

}  // namespace sgemm::matmul
