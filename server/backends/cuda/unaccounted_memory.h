// What this process takes of the GPU beside what its ledger accounts for: graphs, libraries, code.
// CUDA does not tell, so it is what goes missing between looks at what is free. Others take from
// the same GPU, a trainer its gigabytes at any moment: many looks, and what goes missing at once
// and is more than one of ours can be is theirs. Confined to one thread.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "server/backends/cuda/device.h"

namespace dorad::cuda {

class UnaccountedMemory {
 public:
  // The most that is ours between two looks.
  static constexpr int64_t kMostAtOnce = 128 << 20;

  // The ledger is borrowed.
  explicit UnaccountedMemory(const MemoryLedger* ledger) : ledger_(ledger) {}

  // The first one is where counting begins. Errors of MemoryOfDevice.
  absl::Status Look();
  // The same for what the device has free and the ledger holds.
  void Look(int64_t free, int64_t held);

  int64_t bytes() const;
  // What others took (above 0) or gave back in steps too large to be ours.
  int64_t of_others() const { return of_others_; }

 private:
  const MemoryLedger* const ledger_;
  bool looked_ = false;
  int64_t last_ = 0;  // free and held
  int64_t bytes_ = 0;
  int64_t of_others_ = 0;
};

}  // namespace dorad::cuda
