// One scrape of /metrics: reads the rooms' own counts and renders all metrics. Owned by App;
// borrows its sources. Confined to the thread of the metrics HTTP server. Holds locks that a step
// needs only while it copies some numbers.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>

#include "server/adapter/registry/registry.h"
#include "server/adapter/residency/residency.h"
#include "server/adapter/store/store.h"
#include "server/backends/backend.h"
#include "server/colocation/colocation.h"
#include "server/colocation/listener.h"
#include "server/engine/engine.h"
#include "server/platform/metrics/metrics.h"
#include "server/rpc/upload_store.h"
#include "server/security/security_manager.h"

namespace dorad {

class Scrape {
 public:
  struct Sources {
    const Backend* backend = nullptr;
    const adapter::Store* store = nullptr;  // nullptr: none
    const adapter::Residency* residency = nullptr;
    const adapter::AdapterRegistry* registry = nullptr;
    const rpc::UploadStore* uploads = nullptr;
    Colocation* colocation = nullptr;
    const engine::Engine* engine = nullptr;
    const security::SecurityManager* security_manager = nullptr;
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
