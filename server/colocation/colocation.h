// What the server does for a trainer on the same host, behind one seam:
//
//   sleep_controller   memory goes back as a whole, and comes again
//   housekeeper        memory goes back in parts, while requests run (governor decides,
//                      kv_shrinker and the residency give)
//   listener           memory is shared both ways: adapters to be published, base weights lent
//
// Owned by App; made before the parts that it tells to give memory back, and closed before they
// end. Thread-safe between Attach and Close; asleep() and ShrinkKv() always.
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

  // REQUIRES: no load has begun, because its end asks whether anything is asleep.
  void Attach(const Parts& parts);
  // Ends what Attach, Listen and KeepBelow began. Waits for a Sleep, a Wake or the end of a lease
  // that is under way. REQUIRES: nobody calls sleep().
  void Close();

  // Opens the socket at this path for memory of other processes. Statuses of Listener::Start.
  absl::Status Listen(const std::string& socket_path);
  // Keeps the device below the water marks; without a device that others use, nothing happens.
  // REQUIRES: everything that gives memory back has started.
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
