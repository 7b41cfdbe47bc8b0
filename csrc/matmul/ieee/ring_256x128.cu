#include "ring.cuh"
#include "rings.h"

namespace sgemm::matmul {

cudaError_t ring_256x128(const Arguments& g, const Plan& plan, int64_t batch, float* pieces,
                         cudaStream_t stream) {
  return launch_ring<RingTile<256, 128, 4>>(g, plan, batch, pieces, stream);
}

}  // namespace sgemm::matmul
