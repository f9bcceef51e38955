// What the log and the metrics say of an adapter's load that has ended. Thread-safe.
#pragma once

#include "server/adapter/loader.h"
#include "server/base/metrics.h"

namespace dorad {

void ReportLoad(const adapter::EndedLoad& load, Metrics* metrics);

}  // namespace dorad
