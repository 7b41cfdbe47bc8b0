// Copies of operands that the ring kernels cannot take as they are.
#pragma once
#include "../kernel.cuh"

namespace sgemm::matmul {

// An operand, x its other dimension than k, and its panels of k lines of x neighbours, `pitch` apart.
struct PanelJob {
  const float* from;
  int64_t from_batch, from_x, from_k;  // strides
  int x, k, batch;
  float* to;
  int64_t pitch;
};

// Of one or two operands; where x is 0 there is no second.
cudaError_t copy_panels(const PanelJob& one, const PanelJob& other, cudaStream_t stream);

}  // namespace sgemm::matmul
