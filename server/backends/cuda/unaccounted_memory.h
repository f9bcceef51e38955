// GPU memory of this process outside its ledger: graphs, libraries, code. CUDA does not report it,
// and NVML only where it knows a process by the number that the process itself sees (not in every
// container), so it is estimated from changes of the free memory. Other processes (a trainer)
// allocate gigabytes on the same GPU at any moment: with frequent measurements, a change larger
// than any of ours is theirs. Confined to one thread.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "server/backends/cuda/device.h"

namespace dorad::cuda {

class UnaccountedMemory {
 public:
  // The largest change between two measurements that counts as ours.
  static constexpr int64_t kMostAtOnce = 128 << 20;

  // The ledger is borrowed.
  explicit UnaccountedMemory(const MemoryLedger* ledger) : ledger_(ledger) {}

  // The first call begins the count. Errors of MemoryOfDevice.
  absl::Status Look();
  // The same with the device's free bytes and the ledger's bytes.
  void Look(int64_t free, int64_t held);

  int64_t bytes() const;
  // Bytes that other processes allocated (above 0) or freed, in steps too large to be ours.
  int64_t of_others() const { return of_others_; }

 private:
  const MemoryLedger* const ledger_;
  bool looked_ = false;
  int64_t last_ = 0;  // free and held
  int64_t bytes_ = 0;
  int64_t of_others_ = 0;
};

}  // namespace dorad::cuda
