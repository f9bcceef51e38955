// The CPU backend of ModelRunner. Includes no torch; confined to the engine thread.
#pragma once

#include <cstdint>
#include <memory>

#include "server/engine/model_runner.h"

namespace dorad::model {
class LoadedModel;
}  // namespace dorad::model

namespace dorad::engine {

// model is borrowed and outlives the runner. max_positions: the longest sequence that will be run.
std::unique_ptr<ModelRunner> MakeCpuModelRunner(const model::LoadedModel& model, int64_t kv_pages,
                                                int64_t max_positions);

}  // namespace dorad::engine
