// What every stage shares: matrices with edges, cp.async, and the launch. Nothing in here is an optimisation:
// those all live in stages/.
#pragma once
#include "gemm.h"
#ifdef SGEMM_HOST
#include "host/sectors.h"
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

constexpr int WARP = 32;               // threads
constexpr int MAX_SHARED = 48 * 1024;  // bytes that a block can have on every GPU without asking

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// cp.async copies from global to shared memory while the thread goes on, and through no register. Each thread
// collects its copies in groups and waits for them by group; that others see what it waited for takes a
// barrier more. The CPU executor reports copies that nobody waits for, and the result of reading one too
// early depends on the executor's schedule.

// Starts to copy BYTES, of which only the first `valid` are read and the rest becomes 0. Both addresses are
// multiples of BYTES. 16 bytes go past the L1 (.cg), which smaller copies cannot (.ca).
template <int BYTES>
__device__ __forceinline__ void copy_async(float* shared, const float* global, int valid = BYTES) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies BYTES of 4, 8 or 16");
#ifdef SGEMM_HOST
  simt::copy_async(shared, global, BYTES, valid);
#else
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(BYTES),
                 "r"(valid)
                 : "memory");
#endif
}

// Closes the group of the copies that this thread has started since the last one, be there any or none.
__device__ __forceinline__ void copy_commit() {
#ifdef SGEMM_HOST
  simt::copy_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but the last GROUPS of this thread's closed groups have landed.
template <int GROUPS>
__device__ __forceinline__ void copy_wait() {
#ifdef SGEMM_HOST
  simt::copy_wait(GROUPS);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
#endif
}

// Four floats, 16 bytes, in one instruction. `from` and `to` are multiples of 16 bytes, or registers.
__device__ __forceinline__ void copy4(float* to, const float* from) {
#ifdef SGEMM_HOST
  simt::copy(to, from, 4 * sizeof(float));
#else
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
#endif
}

// Tells simt::sector_counter which of an array's elements a lane asks for at once: null if none. Only a
// test's build counts: a branch here would keep the compiler from joining neighbouring loads.
__device__ __forceinline__ void count_sectors(const float* array, const float* element, int elements = 1) {
#ifdef SGEMM_COUNT_SECTORS
  if (simt::sector_counter) simt::sector_counter->access(array, element, elements * sizeof *element);
#endif
}

// kExact:   the block tiles cover the matrices exactly, so nothing is checked.
// kGuarded: reads outside a matrix give 0, writes outside it are dropped.
// launch_tiles() decides; a kernel never asks.
enum class Edge { kExact, kGuarded };

// A row-major operand.
template <Edge E>
struct In {
  const float* data;
  int rows, cols;
  int64_t ld;                          // elements from one row to the next
  int64_t pitch = ld * sizeof(float);  // bytes

  __device__ __forceinline__ float load(int row, int col) const {
    if (outside(row, col)) return count_sectors(data, nullptr), 0.0f;
    const float* element = E == Edge::kExact ? data + row * ld + col : at_pitch(row, col);
    count_sectors(data, element);
    return *element;
  }

  // Four elements of a row, to shared memory or registers. A guarded matrix need not be aligned: they are
  // read one by one.
  __device__ __forceinline__ void load4(float* to, int row, int col) const {
    const float* elements = address(row, col);
    if constexpr (E == Edge::kExact) {
      count_sectors(data, elements, 4);
      copy4(to, elements);
    } else {
      float values[4];
      for (int j = 0; j < 4; ++j) {
        const bool skip = outside(row, col + j);
        count_sectors(data, skip ? nullptr : elements + j);
        values[j] = skip ? 0.0f : elements[j];
      }
      copy4(to, values);
    }
  }

  // One element, by cp.async.
  __device__ __forceinline__ void copy_async(float* shared, int row, int col) const {
    copy_async(shared, address(row, col), outside(row, col));
  }

  // Four elements of a row, by cp.async.
  __device__ __forceinline__ void copy4_async(float* shared, int row, int col) const {
    const float* elements = address(row, col);
    if constexpr (E == Edge::kExact) {
      count_sectors(data, elements, 4);
      sgemm::copy_async<4 * sizeof(float)>(shared, elements);
    } else {
      for (int j = 0; j < 4; ++j) copy_async(shared + j, elements + j, outside(row, col + j));
    }
  }

  __device__ __forceinline__ bool outside(int row, int col) const {
    return E == Edge::kGuarded && (row >= rows || col >= cols);
  }

 private:
  // The address of an element, which may be anywhere if it is not read. Compilers step from row to row where
  // they can, and so want it plain; but in a guarded kernel every address is computed anew, and then an
  // unsigned row saves instructions, and a distance in bytes saves more of them (but takes registers).
  __device__ __forceinline__ const float* address(int row, int col) const {
    if constexpr (E == Edge::kExact) return data + row * ld + col;
    return data + static_cast<unsigned>(row) * ld + col;
  }
  __device__ __forceinline__ const float* at_pitch(int row, int col) const {
    const auto* first = reinterpret_cast<const char*>(data + col);
    return reinterpret_cast<const float*>(first + static_cast<unsigned>(row) * pitch);
  }

  __device__ __forceinline__ void copy_async(float* shared, const float* element, bool outside) const {
    count_sectors(data, outside ? nullptr : element);
    sgemm::copy_async<sizeof(float)>(shared, element, outside ? 0 : sizeof(float));
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
    if (E == Edge::kGuarded && (row >= rows || col >= cols)) {
      count_sectors(c, nullptr);
      count_sectors(data, nullptr);
      return;
    }
    const float value = scaled(row, col, acc);
    float* element = data + row * ld + col;
    count_sectors(data, element);
    *element = value;
  }

  // Four elements of a row. c may have any strides: its elements are read one by one.
  __device__ __forceinline__ void store4(int row, int col, const float* acc) const {
    if constexpr (E == Edge::kExact) {
      float values[4];
      for (int j = 0; j < 4; ++j) values[j] = scaled(row, col + j, acc[j]);
      float* elements = data + row * ld + col;
      count_sectors(data, elements, 4);
      copy4(elements, values);
    } else {
      for (int j = 0; j < 4; ++j) store(row, col + j, acc[j]);
    }
  }

  __device__ __forceinline__ float scaled(int row, int col, float acc) const {
    if (c == nullptr) return alpha * acc;
    const float* element = c + row * c_row + col * c_col;
    count_sectors(c, element);
    return alpha * acc + beta * *element;
  }
};

template <Edge E>
using Kernel = void (*)(In<E> A, In<E> B, Out<E> C);

// The one way to launch, here and on the CPU.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                          Arguments... arguments) {
#ifdef SGEMM_HOST
  simt::launch(grid, block, *stream, [=] { kernel(arguments...); });
  return cudaSuccess;
#else
  kernel<<<grid, block, 0, stream>>>(arguments...);
  return cudaGetLastError();
#endif
}

template <Edge E>
cudaError_t start(Kernel<E> kernel, dim3 grid, dim3 block, const Problem& p, cudaStream_t stream) {
  const int M = static_cast<int>(p.M), N = static_cast<int>(p.N), K = static_cast<int>(p.K);
  const In<E> A{p.A, M, K, p.lda}, B{p.B, K, N, p.ldb};
  const Out<E> C{p.out, M, N, p.ldo, p.c, p.c_row, p.c_col, p.alpha, p.beta};
  return launch_kernel(kernel, grid, block, stream, A, B, C);
}

// Whether BM x BN x BK tiles cover the matrices exactly, and A, B, out and each of their rows begin at
// multiples of VECTOR floats: as many as an exact kernel moves at once.
template <int BM, int BN, int BK, int VECTOR = 1>
bool covers(const Problem& p) {
  const auto addresses = reinterpret_cast<uintptr_t>(p.A) | reinterpret_cast<uintptr_t>(p.B) |
                         reinterpret_cast<uintptr_t>(p.out);
  return p.M % BM == 0 && p.N % BN == 0 && p.K % BK == 0 && addresses % (VECTOR * sizeof(float)) == 0 &&
         (p.lda | p.ldb | p.ldo) % VECTOR == 0;
}

// One block per BM x BN tile of C. blockIdx.x walks N and blockIdx.y walks M: neighbouring blocks share rows
// of A. A grid has at most 65,535 blocks along y, so more row tiles than that take another launch.
template <int BM, int BN, Edge E>
cudaError_t launch_grid(Kernel<E> kernel, dim3 block, const Problem& p, cudaStream_t stream) {
  constexpr int64_t kMaxRows = int64_t{65535} * BM;
  cudaError_t error = cudaSuccess;
  for (int64_t row = 0; row < p.M && error == cudaSuccess; row += kMaxRows) {
    Problem rows = p;
    rows.M = p.M - row < kMaxRows ? p.M - row : kMaxRows;
    rows.A += row * p.lda;
    rows.out += row * p.ldo;
    if (p.c != nullptr) rows.c += row * p.c_row;
    const dim3 grid(static_cast<unsigned>(ceil_div(p.N, BN)), static_cast<unsigned>(ceil_div(rows.M, BM)));
    error = start(kernel, grid, block, rows, stream);
  }
  return error;
}

template <int BM, int BN, int BK, int VECTOR = 1>
cudaError_t launch_tiles(Kernel<Edge::kExact> exact, Kernel<Edge::kGuarded> guarded, dim3 block,
                         const Problem& p, cudaStream_t stream) {
  return covers<BM, BN, BK, VECTOR>(p) ? launch_grid<BM, BN>(exact, block, p, stream)
                                       : launch_grid<BM, BN>(guarded, block, p, stream);
}

}  // namespace sgemm
