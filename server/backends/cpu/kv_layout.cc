#include "server/backends/cpu/kv_layout.h"

#include "server/engine/model_runner.h"
#include "server/model/kv_groups.h"

namespace dorad::engine {

int64_t CpuKvPageBytes(const model::ModelConfig& model, int64_t element_bytes) {
  return 2 * model::KvGroups(model).slots * model.kv_size() * kKvPageTokens * element_bytes;
}

model::DeltaStateLayout CpuStateLayout(const model::ModelConfig& model, int64_t element_bytes) {
  return {model, model.kv_size() * kKvPageTokens * element_bytes, 2 * model.num_attention_layers(),
          sizeof(float)};
}

}  // namespace dorad::engine
