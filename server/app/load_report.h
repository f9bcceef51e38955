// Writes a finished load of an adapter to the log and the metrics. Thread-safe.
#pragma once

#include "server/adapter/publish/loader.h"
#include "server/platform/metrics/metrics.h"

namespace dorad {

void ReportLoad(const adapter::EndedLoad& load, Metrics* metrics);

}  // namespace dorad
