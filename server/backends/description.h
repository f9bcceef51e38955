// The properties of a backend that follow from the configuration and the model's config.json,
// before weights are read. Pure functions and therefore thread-safe.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "server/backends/backend.h"
#include "server/model/model_config.h"
#include "server/platform/config/config.h"

namespace dorad {

// Tokens; max_context 0: the model's own. INVALID_ARGUMENT (MAX_CONTEXT_OUT_OF_RANGE).
absl::StatusOr<int64_t> ContextLength(const model::ModelConfig& model, int64_t max_context);
// KV pages in `kv_bytes`. INVALID_ARGUMENT (KV_TOO_SMALL).
absl::StatusOr<int64_t> KvPages(int64_t kv_bytes, const KvSizes& sizes);
// Pages of an automatic KV cache: as many as fit into `available` bytes, but not more than
// max_running_sequences of a whole context can use, and at least two blocks beside the states.
int64_t AutoKvPages(int64_t available, const KvSizes& sizes, int64_t context_length,
                    int64_t max_running_sequences);
// Whether fp32 factors of adapters are rounded to bf16 for serving (adapters.dtype).
bool FactorsInBf16(const Config& config);

}  // namespace dorad
