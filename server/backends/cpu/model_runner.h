// The CPU backend of ModelRunner. Includes no torch; confined to the engine thread.
#pragma once

#include <cstdint>
#include <memory>

#include "server/engine/model_runner.h"
#include "server/model/delta_config.h"

namespace dorad::model {
class LoadedModel;
}  // namespace dorad::model

namespace dorad::engine {

// Bytes of one KV page over all layers; each of its numbers has element_bytes.
int64_t CpuKvPageBytes(const model::ModelConfig& model, int64_t element_bytes);

// The places of a recurrent state in such pages.
model::DeltaStateLayout CpuStateLayout(const model::ModelConfig& model, int64_t element_bytes);

// model is borrowed and outlives the runner. max_positions: the longest sequence that will be run.
std::unique_ptr<ModelRunner> MakeCpuModelRunner(const model::LoadedModel& model, int64_t kv_pages,
                                                int64_t max_positions);

}  // namespace dorad::engine
