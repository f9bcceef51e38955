#include "server/colocation/colocation.h"

#include <functional>
#include <utility>

#include "server/platform/config/config.h"
#include "server/platform/error.h"

namespace dorad {

void Colocation::Attach(const Parts& parts) {
  parts_ = parts;
  device_waits_ = std::make_unique<ThreadPool>(1, 0);
  sleep_ = std::make_unique<SleepController>(
      parts.backend, parts.residency, parts.loader, parts.engine,
      [this](std::function<void()> task) { device_waits_->Submit(std::move(task)); });
  kv_shrinker_.Open(parts.engine);
}

void Colocation::Close() {
  housekeeper_.reset();
  listener_.reset();
  device_waits_.reset();
  kv_shrinker_.Close();
}

absl::Status Colocation::Listen(const std::string& socket_path) {
  shared_memory::Listener::Options options;
  options.path = socket_path;
  options.lease_weights = [this] { return LeaseWeights(); };
  if (auto open = parts_.backend->device_memory_opener(); open != nullptr) {
    options.open_device = [open](const shared_memory::MemoryRegistration& registration) {
      return open(registration.ipc_handle, registration.device_uuid, registration.size);
    };
  }
  DORAD_ASSIGN_OR_RETURN(listener_, shared_memory::Listener::Start(std::move(options)));
  return absl::OkStatus();
}

void Colocation::KeepBelow(const MemoryConfig& config) {
  const std::optional<Backend::Device> device = parts_.backend->device();
  if (!device) return;
  const Governor::Marks marks{ByteLimit(config.high_water, device->total),
                              ByteLimit(config.low_water, device->total)};
  housekeeper_ = std::make_unique<Housekeeper>(marks, parts_.backend, parts_.residency,
                                               parts_.engine, &kv_shrinker_, parts_.metrics);
}

// The end of a lease may wait for uses of the weights; the listener's thread must not wait.
absl::StatusOr<std::shared_ptr<const shared_memory::WeightsLease>> Colocation::LeaseWeights() {
  DORAD_ASSIGN_OR_RETURN(std::unique_ptr<shared_memory::WeightsLease> lease,
                         parts_.backend->LeaseWeights());
  return std::shared_ptr<const shared_memory::WeightsLease>(
      lease.release(), [this](const shared_memory::WeightsLease* ended) {
        device_waits_->Submit([ended] { delete ended; });
      });
}

}  // namespace dorad
