// Runs CUDA kernels on the CPU, from the same source, compiled by an ordinary C++ compiler. It is slow; it is
// there for machines without a GPU, and because mistakes that a GPU hides are errors here. It knows only what
// the stages use: blocks, threads, shared memory, __syncthreads() and cp.async.
//
// The threads of a block are fibers on one OS thread: each runs until its next __syncthreads(). Blocks are
// spread over the OS threads of a Stream. There are no warps, so what needs lockstep (shuffles, mma) does not
// work.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "stream.h"

struct uint3 {
  unsigned x, y, z;
};
struct dim3 : uint3 {
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : uint3{x, y, z} {}
};
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };

namespace simt {

// Runs thread(context) for every thread of every block. Throws std::runtime_error where threads of a block
// skip a barrier that others wait at (naming it), where one ends with a cp.async in flight, where an address
// is not aligned as copy() and cp.async ask, where a kernel overruns its stack, and when interrupted.
void launch(dim3 grid, dim3 block, Stream& stream, void (*thread)(const void*), const void* context);

template <typename F>
void launch(dim3 grid, dim3 block, Stream& stream, const F& thread) {
  launch(grid, block, stream, [](const void* f) { (*static_cast<const F*>(f))(); }, &thread);
}

void misaligned(const void* address, size_t bytes);
inline void require_aligned(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) misaligned(address, bytes);
}

// What one instruction copies between memory and a thread's own variables, its registers. An address in
// memory has to be a multiple of the bytes; otherwise the launch fails.
inline void copy(void* to, const void* from, size_t bytes) {
  require_aligned(to, bytes);
  require_aligned(from, bytes);
  std::memcpy(to, from, bytes);
}

// cp.async of the thread that calls: bytes of shared memory from `valid` bytes of global memory and zeros.
void copy_async(void* shared, const void* global, size_t bytes, size_t valid);
void copy_commit();
void copy_wait(unsigned groups_in_flight);

}  // namespace simt

using cudaStream_t = simt::Stream*;

#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __global__ static
// One variable for each OS thread, that is for each block being run. AddressSanitizer puts no red zones
// around those, so with it there is one variable, and one OS thread does all the work. (__global__ is static
// because what is shared in an ordinary template would have no red zones either.)
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ static thread_local
#endif

extern thread_local uint3 threadIdx, blockIdx;
extern thread_local dim3 blockDim, gridDim;

void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE());
