#include "sectors.h"

#include <algorithm>

#include "simt.h"

namespace simt {

void SectorCounter::access(const void* array, const void* address, int bytes) {
  Array& a = arrays_[array];
  const size_t thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const size_t warp = thread / kWarpSize;
  if (thread >= a.accesses.size()) a.accesses.resize(thread + 1);
  if (warp >= a.requests.size()) a.requests.resize(warp + 1);
  const size_t n = a.accesses[thread]++;
  if (n >= a.requests[warp].size()) a.requests[warp].resize(n + 1);
  if (address == nullptr) return;
  Request& sectors = a.requests[warp][n];
  const auto first = reinterpret_cast<uintptr_t>(address);
  for (uintptr_t sector = first / kSectorBytes; sector <= (first + bytes - 1) / kSectorBytes; ++sector)
    if (std::find(sectors.begin(), sectors.end(), sector) == sectors.end()) sectors.push_back(sector);
}

void SectorCounter::end_block() {
  for (auto& [_, array] : arrays_) {
    for (const auto& warp : array.requests)
      for (const Request& sectors : warp) {
        array.count.requests += !sectors.empty();
        array.count.sectors += static_cast<int64_t>(sectors.size());
      }
    array.accesses.clear();
    array.requests.clear();
  }
}

SectorCounter::Count SectorCounter::operator[](const void* array) const {
  const auto found = arrays_.find(array);
  return found == arrays_.end() ? Count{} : found->second.count;
}

}  // namespace simt
