// Runs a plan.
#pragma once
#ifdef SGEMM_HOST
#include "../host/simt.h"
#else
#include <cuda_runtime_api.h>
#endif
#include "select.h"

namespace sgemm::matmul {

// workspace: plan.workspace floats, aligned to 16 bytes; problem: the one that the plan was made for.
cudaError_t launch(const Plan& plan, const Problem& problem, float* workspace, cudaStream_t stream);

}  // namespace sgemm::matmul
