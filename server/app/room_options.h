// What the configuration and the model mean for each room of the server. Functions are pure, but
// for ApplyLogging.
#pragma once

#include <cstdint>

#include "server/adapter/loader.h"
#include "server/app/backend.h"
#include "server/base/config.h"
#include "server/base/metrics.h"
#include "server/engine/options.h"
#include "server/rpc/services.h"
#include "server/rpc/upload_store.h"

namespace dorad {

// Values above int32's range mean its largest.
int32_t ToInt32(int64_t value);
// Of the CPU's team.
int Threads(const EngineConfig& config);

// What compute_dtype "auto" means on the device.
void ResolveComputeDtype(ModelOptions* model);
void ApplyLogging(const LogConfig& config);

engine::EngineOptions ToEngineOptions(const Config& config, const Backend::Info& model);
adapter::LoaderOptions ToLoaderOptions(const Config& config);
rpc::UploadStore::Options ToUploadOptions(const Config& config, bool has_store);
Metrics::Info ToMetricsInfo(const Config& config, const Backend::Info& model);
// As of now: it has the time of the start.
rpc::ServerInfo ToServerInfo(const Config& config, const Backend::Info& model);

}  // namespace dorad
