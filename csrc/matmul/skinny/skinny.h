#pragma once
#include "../kernel.cuh"
#include "../select.h"

namespace sgemm::matmul {

// grid.x is the launcher's own.
cudaError_t launch_skinny(const Arguments& g, const Plan& plan, dim3 grid, cudaStream_t stream);

}  // namespace sgemm::matmul
