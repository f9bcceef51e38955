#include "server/app/load_report.h"

#include <map>
#include <string>

#include "absl/time/time.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/log.h"

namespace dorad {

void ReportLoad(const adapter::EndedLoad& load, Metrics* metrics) {
  if (!load.status.ok()) {
    const std::string reason = ReasonOf(load.status);
    metrics->AdapterLoadFailed(reason);
    LogWarning("adapter load failed", {{"adapter", load.name},
                                       {"version", load.version},
                                       {"reason", reason},
                                       {"error", std::string(load.status.message())}});
    return;
  }
  const adapter::AdapterSummary* const summary = load.summary;
  DORAD_CHECK(summary != nullptr);
  const adapter::LoadTiming& timing = summary->timing;
  std::map<std::string, absl::Duration> stages = {
      {"queue", load.queue},         {"read", timing.read},
      {"validate", timing.validate}, {"copy", timing.copy},
      {"norms", timing.norms},       {"store", timing.store},
      {"activate", load.activate},   {"total", load.queue + timing.total + load.activate}};
  // A load without a stage is no sample of its time.
  std::erase_if(stages, [](const auto& stage) { return stage.second == absl::ZeroDuration(); });
  metrics->AdapterLoaded(stages);
  metrics->AdapterAnnounced(load.name);
  LogInfo("adapter loaded", {{"adapter", load.name},
                             {"version", load.version},
                             {"digest", summary->digest},
                             {"resident_bytes", summary->resident_bytes},
                             {"seconds", absl::ToDoubleSeconds(timing.total)},
                             {"norm_seconds", absl::ToDoubleSeconds(timing.norms)}});
}

}  // namespace dorad
