// One scrape of /metrics: reads what the rooms count themselves, and renders all. Owned by App;
// what it is given outlives it. Confined to the thread of the metrics HTTP server. Holds no lock
// that a step needs for longer than it takes to copy some numbers.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>

#include "server/adapter/registry.h"
#include "server/adapter/residency.h"
#include "server/adapter/store.h"
#include "server/app/backend.h"
#include "server/app/sleeper.h"
#include "server/base/metrics.h"
#include "server/engine/engine.h"
#include "server/handover/listener.h"
#include "server/rpc/upload_store.h"
#include "server/security/guard.h"

namespace dorad {

class Scrape {
 public:
  struct Sources {
    const Backend* backend = nullptr;
    const adapter::Store* store = nullptr;  // nullptr: none
    const adapter::Residency* residency = nullptr;
    const adapter::AdapterRegistry* registry = nullptr;
    const rpc::UploadStore* uploads = nullptr;
    const Sleeper* sleeper = nullptr;
    const engine::Engine* engine = nullptr;
    const handover::Listener* handover = nullptr;  // nullptr: none
    const security::Guard* guard = nullptr;
    std::function<std::map<std::string, int64_t>()> memory_by_kind;
  };
  Scrape(Sources sources, Metrics* metrics) : from_(std::move(sources)), metrics_(*metrics) {}

  // Prometheus' text format.
  std::string Render();

 private:
  Metrics::AdapterGauges CountAdapters() const;
  void CountMemory();

  const Sources from_;
  Metrics& metrics_;
};

}  // namespace dorad
