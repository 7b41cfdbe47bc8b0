// Counts what the warps of a launch ask of global memory, as a GPU's counters l1tex__t_requests and
// l1tex__t_sectors do: an instruction that a warp executes is one request, for as many sectors as its lanes
// touch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace simt {

constexpr int kWarpSize = 32;
constexpr int kSectorBytes = 32;

// The lanes of a warp run one after the other here, so their accesses are lined up afterwards: the n-th of
// each lane to an array belongs to the n-th of the others. That is the same instruction if all lanes make as
// many, which those of In and Out do: at an edge they are inactive, and call all the same.
class SectorCounter {
 public:
  struct Count {
    int64_t requests = 0, sectors = 0;
  };

  // The thread that calls reads or writes [address, address + bytes) of an array; null: it is inactive, and
  // touches no sector. A request of inactive lanes alone is none.
  void access(const void* array, const void* address, int bytes);
  void end_block();
  Count operator[](const void* array) const;

 private:
  using Request = std::vector<uintptr_t>;  // its sectors
  struct Array {
    Count count;
    std::vector<size_t> accesses;                // of each thread of the block so far
    std::vector<std::vector<Request>> requests;  // of each of its warps
  };
  std::map<const void*, Array> arrays_;
};

// Set by a program that wants to know, between launches; those then use one OS thread.
inline SectorCounter* sector_counter = nullptr;

}  // namespace simt
