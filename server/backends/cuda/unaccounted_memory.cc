#include "server/backends/cuda/unaccounted_memory.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "server/platform/error.h"

namespace dorad::cuda {

absl::Status UnaccountedMemory::Look() {
  DORAD_ASSIGN_OR_RETURN(const DeviceMemory memory, MemoryOfDevice());
  Look(memory.free, ledger_->total());
  return absl::OkStatus();
}

void UnaccountedMemory::Look(int64_t free, int64_t held) {
  const int64_t last = std::exchange(last_, free + held);
  if (!std::exchange(looked_, true)) return;
  const int64_t gone = last - last_;
  (std::abs(gone) > kMostAtOnce ? of_others_ : bytes_) += gone;
}

int64_t UnaccountedMemory::bytes() const { return std::max<int64_t>(0, bytes_); }

}  // namespace dorad::cuda
