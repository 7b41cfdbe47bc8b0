// What a product op computes. Plain C++: neither torch nor CUDA.
#pragma once
#include <cstdint>

namespace sgemm::matmul {

// A matrix for each of a batch. Strides are in elements, and any: 0 where something repeats.
template <typename T>
struct Strided {
  T* data;
  int64_t batch, row, col;

  Strided transposed() const { return {data, batch, col, row}; }
};
using Operand = Strided<const float>;
using Result = Strided<float>;

// out = alpha * (A @ B) + beta * C, `batch` times.
struct Problem {
  int64_t batch, M, N, K;  // M, N and K at most kMaxDim each
  Operand A, B;            // M x K, K x N
  Operand C;               // M x N; without data where beta is 0: then it is not read
  Result out;              // M x N
  float alpha, beta;

  // out^T = alpha * (B^T @ A^T) + beta * C^T: the same product, its rows and columns exchanged.
  Problem transposed() const {
    return {batch, N, M, K, B.transposed(), A.transposed(), C.transposed(), out.transposed(), alpha, beta};
  }
};

}  // namespace sgemm::matmul
