// The sizes of the CPU's KV cache, whose pages have keys and values of 16 tokens in each layer of a
// group (model::KvGroups). Pure functions and therefore thread-safe.
#pragma once

#include <cstdint>

#include "server/model/delta_config.h"

namespace dorad::engine {

// Bytes of one KV page over all its layers; each of its numbers has element_bytes.
int64_t CpuKvPageBytes(const model::ModelConfig& model, int64_t element_bytes);

// The places of a recurrent state in such pages.
model::DeltaStateLayout CpuStateLayout(const model::ModelConfig& model, int64_t element_bytes);

}  // namespace dorad::engine
