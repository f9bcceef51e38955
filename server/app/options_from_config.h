// Converts the configuration and the model's description to each room's options. All functions but
// ApplyLogging are pure and therefore thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "server/adapter/publish/loader.h"
#include "server/backends/backend.h"
#include "server/engine/options.h"
#include "server/platform/config/config.h"
#include "server/platform/log.h"
#include "server/platform/metrics/metrics.h"
#include "server/rpc/peers.h"
#include "server/rpc/services.h"
#include "server/rpc/upload_store.h"

namespace dorad {

// Values above int32's range become its largest value.
int32_t ToInt32(int64_t value);

// The configuration with values in place of "auto", except for engine.kv_bytes, which the backend
// chooses after the weights are loaded. May look for a GPU.
Config Resolved(Config config);
// The keys that Resolved fills in, with their values: for the log.
std::vector<LogField> ChosenValues(const Config& config, const Config& resolved,
                                   const Backend::Info& model);
void ApplyLogging(const LogConfig& config);

engine::EngineOptions ToEngineOptions(const Config& config, const Backend::Info& model);
adapter::LoaderOptions ToLoaderOptions(const Config& config);
rpc::UploadStore::Options ToUploadOptions(const Config& config, bool has_store);
// `own`: the server's certificate, borrowed; nullptr: none.
rpc::Peers::Options ToPeerOptions(const Config& config, const security::TlsFiles* own);
Metrics::Info ToMetricsInfo(const Config& config, const Backend::Info& model);
// Stores the time of this call as the time of the start.
rpc::ServerInfo ToServerInfo(const Config& config, const Backend::Info& model);

}  // namespace dorad
