// Keeps a device that others use, too, below the water marks: looks at its memory once a second and
// lets go what Governor says. Owned by App; what it is given outlives it. Its thread computes
// nothing, waits for copies to host memory, and never holds the engine up.
#pragma once

#include <thread>

#include "absl/synchronization/notification.h"
#include "server/adapter/residency.h"
#include "server/app/backend.h"
#include "server/base/governor.h"
#include "server/base/metrics.h"

namespace dorad {

class Housekeeper {
 public:
  // REQUIRES: the backend has a device.
  Housekeeper(Governor::Marks marks, Backend* backend, adapter::Residency* residency,
              Metrics* metrics);
  // Waits for what is leaving.
  ~Housekeeper();

 private:
  void Turn();
  Governor::Snapshot Look(const Backend::Device& device) const;

  const Governor governor_;
  Backend& backend_;
  adapter::Residency& residency_;
  Metrics& metrics_;
  bool has_warned_ = false;  // of pressure that nothing relieves, since it began
  absl::Notification stop_;
  std::thread thread_;
};

}  // namespace dorad
