// The stages on the CPU, as the op layer sees them: no CUDA names, so that it can see the real ones beside
// them.
#pragma once
#include "../gemm.h"
#include "stream.h"

namespace sgemm_cpu {

// Runs a stage ("stage2") on the CPU. Throws what simt::launch() throws.
void launch(const char* stage, const sgemm::Problem& problem, simt::Stream& stream);

}  // namespace sgemm_cpu
