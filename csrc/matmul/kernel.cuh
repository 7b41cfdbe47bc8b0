// What the kernels of product ops are given, and what they share.
#pragma once
#include "../gemm.cuh"
#include "problem.h"

namespace sgemm::matmul {

// A launch: a Problem whose batch fits a grid, one block a tile (x), a part of K (y) and a product (z). With
// more than one part, out is the parts' workspace, and alpha, beta and C wait for the kernel that adds the
// parts up.
struct Arguments {
  Operand A, B, C;
  Result out;
  int M, N, K;
  int split_k;        // what a part takes of K
  int64_t out_split;  // from one part's out to the next
  float alpha, beta;
  bool vector_out;  // four neighbours of a row of out are stored at once
};

// Moves the matrices on to the block's product and part.
struct Part {
  const float *A, *B, *C;
  float* out;
  int k_begin, k_end;
};

__device__ __forceinline__ Part part_of(const Arguments& g) {
  const int64_t batch = blockIdx.z;
  const int begin = blockIdx.y * g.split_k, left = g.K - begin;
  return {g.A.data + batch * g.A.batch,
          g.B.data + batch * g.B.batch,
          g.C.data == nullptr ? nullptr : g.C.data + batch * g.C.batch,
          g.out.data + batch * g.out.batch + blockIdx.y * g.out_split,
          begin,
          begin + (left < g.split_k ? left : g.split_k)};
}

// The block's product where a block computes more than one, and all of K.
__device__ __forceinline__ Part part_of(const Arguments& g, int64_t batch) {
  return {g.A.data + batch * g.A.batch,
          g.B.data + batch * g.B.batch,
          g.C.data == nullptr ? nullptr : g.C.data + batch * g.C.batch,
          g.out.data + batch * g.out.batch,
          0,
          g.K};
}

// Four neighbouring elements of a row of out. It is left to the caller that the row exists.
__device__ __forceinline__ void store4(const Arguments& g, const Part& part, int row, int col,
                                       const float* acc) {
  float values[4];
  for (int j = 0; j < 4; ++j) values[j] = g.alpha * acc[j];
  if (part.C != nullptr)
    for (int j = 0; j < 4; ++j)
      if (col + j < g.N) values[j] += g.beta * part.C[row * g.C.row + (col + j) * g.C.col];
  float* out = part.out + row * g.out.row;
  if (g.vector_out && col + 3 < g.N) {
    copy4(out + col, values);
  } else {
    for (int j = 0; j < 4; ++j)
      if (col + j < g.N) out[(col + j) * g.out.col] = values[j];
  }
}

}  // namespace sgemm::matmul
