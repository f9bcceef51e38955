// Validates the files of an adapter without a server: against the model's config.json, without its
// weights. Functions are thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "server/adapter/registry/version.h"
#include "server/platform/config/config.h"

namespace dorad {

// Reads and validates the folder as a publish does, except for the checks that need weights or a
// device (ToYaml lists them). resident_bytes and timing stay zero. Statuses of ReadModelConfig,
// ReadAdapterFolder and ValidateAdapter.
absl::StatusOr<adapter::AdapterSummary> CheckAdapterFiles(const std::string& folder,
                                                          const Config& config);

// The summary in the words of the API, and the checks that only a server makes.
std::string ToYaml(const adapter::AdapterSummary& summary);

}  // namespace dorad
