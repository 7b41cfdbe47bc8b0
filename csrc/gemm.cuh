// What every stage shares: matrices with edges, and the launch. Nothing in here is an optimisation: those all
// live in stages/.
#pragma once
#include "gemm.h"
#ifdef SGEMM_HOST
#include "host/simt.h"
// A stage is compiled twice and both are linked into one library: the CPU's code has a namespace of its own.
namespace sgemm_cpu {
using namespace sgemm;
}
#define sgemm sgemm_cpu
#else
#include <cuda_runtime.h>
#endif

namespace sgemm {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// kExact:   the block tiles cover the matrices exactly, so nothing is checked.
// kGuarded: reads outside a matrix give 0, writes outside it are dropped.
// launch_tiles() decides; a kernel never asks.
enum class Edge { kExact, kGuarded };

// A row-major operand.
template <Edge E>
struct In {
  const float* data;
  int rows, cols;
  int64_t ld;

  __device__ __forceinline__ float load(int row, int col) const {
    if (E == Edge::kGuarded && (row >= rows || col >= cols)) return 0.0f;
    return data[row * ld + col];
  }
};

// The row-major result. It scales what is stored, so that a kernel computes A @ B and nothing else.
template <Edge E>
struct Out {
  float* data;
  int rows, cols;
  int64_t ld;
  const float* c;  // null: beta is 0, and a NaN in c does not spread
  int64_t c_row, c_col;
  float alpha, beta;

  __device__ __forceinline__ void store(int row, int col, float acc) const {
    if (E == Edge::kGuarded && (row >= rows || col >= cols)) return;
    float value = alpha * acc;
    if (c != nullptr) value += beta * c[row * c_row + col * c_col];
    data[row * ld + col] = value;
  }
};

template <Edge E>
using Kernel = void (*)(In<E> A, In<E> B, Out<E> C);

template <Edge E>
cudaError_t start(Kernel<E> kernel, dim3 grid, dim3 block, const Problem& p, cudaStream_t stream) {
  const int M = static_cast<int>(p.M), N = static_cast<int>(p.N), K = static_cast<int>(p.K);
  const In<E> A{p.A, M, K, p.lda}, B{p.B, K, N, p.ldb};
  const Out<E> C{p.out, M, N, p.ldo, p.c, p.c_row, p.c_col, p.alpha, p.beta};
#ifdef SGEMM_HOST
  simt::launch(grid, block, *stream, [=] { kernel(A, B, C); });
  return cudaSuccess;
#else
  kernel<<<grid, block, 0, stream>>>(A, B, C);
  return cudaGetLastError();
#endif
}

// One block per BM x BN tile of C. blockIdx.x walks N and blockIdx.y walks M: neighbouring blocks share rows
// of A. A grid has at most 65,535 blocks along y, so more row tiles than that take another launch.
template <int BM, int BN, int BK>
cudaError_t launch_tiles(Kernel<Edge::kExact> exact, Kernel<Edge::kGuarded> guarded, dim3 block,
                         const Problem& p, cudaStream_t stream) {
  constexpr int64_t kMaxRows = int64_t{65535} * BM;
  const bool fits = p.M % BM == 0 && p.N % BN == 0 && p.K % BK == 0;
  cudaError_t error = cudaSuccess;
  for (int64_t row = 0; row < p.M && error == cudaSuccess; row += kMaxRows) {
    Problem rows = p;
    rows.M = p.M - row < kMaxRows ? p.M - row : kMaxRows;
    rows.A += row * p.lda;
    rows.out += row * p.ldo;
    if (p.c != nullptr) rows.c += row * p.c_row;
    const dim3 grid(static_cast<unsigned>(ceil_div(p.N, BN)), static_cast<unsigned>(ceil_div(rows.M, BM)));
    error = fits ? start(exact, grid, block, rows, stream) : start(guarded, grid, block, rows, stream);
  }
  return error;
}

}  // namespace sgemm
