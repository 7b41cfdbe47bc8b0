// What compute capability 9.0 adds, as far as we use it: barriers in shared memory that count arrivals and
// bytes (mbarrier), the engine that copies whole tiles (TMA), and registers that warps hand to each other.
// A thin layer: each function is one PTX instruction, or a loop around one.
#pragma once
#include <cuda.h>

#include "gemm.cuh"

// Kernels that need it have an empty body for other GPUs, and are never launched there.
#if __CUDA_ARCH_FEAT_SM90_ALL
#define SGEMM_HOPPER
#endif

namespace sgemm::hopper {

// An address in shared memory, as instructions want it.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarrier: a phase ends when `count` arrivals have come and all bytes that were announced -------------

using Barrier = uint64_t;

__device__ __forceinline__ void init(Barrier* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// After init(), by the thread that did it: the copy engine sees the barriers too. A barrier of the block
// follows.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and announces bytes that the copy engine will write before the phase can end.
__device__ __forceinline__ void arrive_expecting(Barrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Arrives once all that this thread has copied by cp.async has landed. Does not wait.
__device__ __forceinline__ void arrive_after_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Waits for the end of the phase with this parity: 0 for a barrier's first phase, then 1, 0, ...
__device__ __forceinline__ void wait(Barrier* barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// ---- TMA: one thread asks for a box of a tensor, the engine copies it to shared memory --------------------

// The box at (x, y, z), x along adjacent elements. What lies outside of the tensor becomes 0.
__device__ __forceinline__ void copy_box(float* shared, const CUtensorMap* map, int x, int y, int z,
                                         Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
      "%4}], [%5];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

// What this thread has read and written in shared memory comes before what the copy engine writes there next.
__device__ __forceinline__ void fence_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- registers: a warpgroup's share of the multiprocessor's 65,536 ----------------------------------------

template <int REGISTERS>
__device__ __forceinline__ void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// A barrier of some of a block's warps. Barrier 0 is __syncthreads()'s.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- a kernel after another -------------------------------------------------------------------------------

// The stream's next kernel, if it was launched as one that waits, may begin.
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }

// Until all that the stream's previous kernel has written is there.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- the host's side --------------------------------------------------------------------------------------

// Matrices that the copy engine can read: rows of `length` neighbours, `pitch` elements apart, `rows` of them
// in each of `batch` matrices. False where it cannot: addresses and pitches have to be multiples of 16 bytes.
struct Boxes {
  const float* data;
  int64_t length, rows, pitch, batch, batch_pitch;
};
inline bool make_tensor_map(CUtensorMap* map, const Boxes& from, int box_length, int box_rows, bool swizzle) {
  constexpr int64_t MOST = int64_t{1} << 38;  // elements of a pitch
  const auto fits = [](int64_t pitch) { return pitch > 0 && pitch % 4 == 0 && pitch < MOST; };
  if (reinterpret_cast<uintptr_t>(from.data) % 16 != 0) return false;
  if ((from.rows > 1 && !fits(from.pitch)) || (from.batch > 1 && !fits(from.batch_pitch))) return false;
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  if (encode == nullptr) return false;
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t sizes[] = {size(from.length), size(from.rows), size(from.batch)};
  const cuuint64_t pitches[] = {size(from.rows > 1 ? from.pitch * 4 : 16),
                                size(from.batch > 1 ? from.batch_pitch * 4 : 16)};  // bytes
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_length), static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, const_cast<float*>(from.data), sizes, pitches, box,
                steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Launches a kernel, which may have more shared memory than every GPU gives without asking. Where it is the
// stream's previous kernel that it waits for by wait_for_previous(), it may begin before that has ended.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 blocks, int threads, int shared, bool waits,
                   cudaStream_t stream, const Arguments&... arguments) {
  cudaError_t error = cudaSuccess;
  if (shared > MAX_SHARED)
    error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error == cudaSuccess) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = waits ? 1 : 0;
    error = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  }
  if (error != cudaSuccess) cudaGetLastError();  // it is told here, and once
  return error;
}

}  // namespace sgemm::hopper
