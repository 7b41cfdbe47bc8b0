// The problem every kernel is given. Plain C++, so that ops.cpp sees no device code and kernels see no torch.
#pragma once
#include <cstdint>

namespace sgemm {

// out = alpha * (A @ B) + beta * c. Strides and leading dimensions are in elements.
struct Problem {
  int64_t M, N, K;  // at most kMaxDim each
  const float* A;   // M x K, lda elements from one row to the next; within a row they are adjacent
  const float* B;   // K x N, ldb
  const float* c;   // M x N through any strides, 0 where it broadcasts; null: beta is 0 and c is not read
  float* out;       // M x N, ldo
  int64_t lda, ldb, ldo;
  int64_t c_row, c_col;
  float alpha, beta;
};

// Row and column numbers are ints inside a kernel, and may run past the matrix by one block tile.
constexpr int64_t kMaxDim = INT32_MAX - 1024;

}  // namespace sgemm
