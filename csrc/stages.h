// The ladder: the one list of its stages. The op layer, the CPU executor, the Python package, the tests and
// the benchmarks all take it from here.
#pragma once

// clang-format off
#define SGEMM_STAGES(X) \
  X(stage0) X(stage1) X(stage1b) X(stage2) X(stage2b) X(stage3) X(stage3b) X(stage4) X(stage5) X(stage6) \
  X(stage7) X(stage8) X(stage9) X(stage9b) X(stage10)
// clang-format on

// Declares a stage's launcher. Who uses it has CUDA's names, or the CPU executor's in their place.
#define SGEMM_DECLARE(stage)                        \
  namespace sgemm::stage {                          \
  cudaError_t launch(const Problem&, cudaStream_t); \
  }
