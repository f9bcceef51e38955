// Services for a trainer on the same host, behind one seam:
//
//   sleep_controller   releases all memory of a tag, and allocates it again
//   housekeeper        releases some memory while requests run (governor decides, kv_shrinker and
//                      the residency release)
//   listener           shares memory both ways: adapters for a publish, leased base weights
//
// Owned by App; made before the components whose memory it releases, and closed before they end.
// Thread-safe between Attach and Close; asleep() and ShrinkKv() always.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/adapter/publish/loader.h"
#include "server/adapter/residency/residency.h"
#include "server/backends/backend.h"
#include "server/backends/weights_lease.h"
#include "server/colocation/governor.h"
#include "server/colocation/housekeeper.h"
#include "server/colocation/kv_shrinker.h"
#include "server/colocation/listener.h"
#include "server/colocation/sleep_controller.h"
#include "server/engine/engine.h"
#include "server/platform/metrics/metrics.h"
#include "server/platform/thread_pool.h"

namespace dorad {

class Colocation {
 public:
  // All are borrowed.
  struct Parts {
    Backend* backend = nullptr;
    adapter::Residency* residency = nullptr;
    adapter::AdapterLoader* loader = nullptr;
    engine::Engine* engine = nullptr;
    Metrics* metrics = nullptr;
  };
  Colocation() = default;
  ~Colocation() { Close(); }

  // REQUIRES: no load has begun: the end of a load asks whether anything is asleep.
  void Attach(const Parts& parts);
  // Ends the effects of Attach, Listen and KeepBelow. Waits for a running Sleep, Wake or end of a
  // lease. REQUIRES: no further calls of sleep().
  void Close();

  // Opens the socket at this path for memory of other processes. Statuses of Listener::Start.
  absl::Status Listen(const std::string& socket_path);
  // Keeps the device below the water marks; no effect without a shared device. REQUIRES: the engine
  // and the residency have started.
  void KeepBelow(const MemoryConfig& config);

  // REQUIRES: Attach was called.
  SleepControl* sleep() { return sleep_.get(); }
  // Whether any tag is asleep.
  bool asleep() const { return sleep_ != nullptr && !sleep_->asleep().empty(); }
  // As KvShrinker::Shrink.
  int64_t ShrinkKv(int64_t bytes) { return kv_shrinker_.Shrink(bytes); }
  // nullptr: nothing can be published from memory.
  const shared_memory::Listener* listener() const { return listener_.get(); }

 private:
  absl::StatusOr<std::shared_ptr<const shared_memory::WeightsLease>> LeaseWeights();

  Parts parts_;
  KvShrinker kv_shrinker_;
  std::unique_ptr<SleepController> sleep_;
  // Sleep, Wake and the ends of leases, which wait for the device; `sleep_` runs on it.
  std::unique_ptr<ThreadPool> device_waits_;
  std::unique_ptr<shared_memory::Listener> listener_;
  std::unique_ptr<Housekeeper> housekeeper_;
};

}  // namespace dorad
