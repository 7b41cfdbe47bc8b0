#define SGEMM_HOST
#include "stages.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "../gemm.cuh"
#include "../stages.h"

SGEMM_STAGES(SGEMM_DECLARE)

void sgemm_cpu::launch(const char* stage, const Problem& problem, simt::Stream& stream) {
#define SGEMM_LAUNCH(name)              \
  if (std::strcmp(stage, #name) == 0) { \
    name::launch(problem, &stream);     \
    return;                             \
  }
  SGEMM_STAGES(SGEMM_LAUNCH)
  throw std::runtime_error(std::string("no stage is named ") + stage);
}
