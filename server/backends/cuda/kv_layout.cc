#include "server/backends/cuda/kv_layout.h"

#include <cuda_bf16.h>

#include "kernels/decoder/rows.h"
#include "server/backends/cuda/mapped_memory.h"
#include "server/model/kv_groups.h"

namespace dorad::cuda {
namespace {

constexpr int64_t kElementBytes = sizeof(__nv_bfloat16);

int64_t PlanesOf(const model::ModelConfig& config) { return 2 * model::KvGroups(config).slots; }

int64_t PlanePageBytes(const model::ModelConfig& config) {
  return config.kv_size() * kernels::kKvPageTokens * kElementBytes;
}

}  // namespace

int64_t KvPageBytes(const model::ModelConfig& config) {
  return PlanesOf(config) * PlanePageBytes(config);
}

KvLayout KvLayoutOf(const model::ModelConfig& config) {
  return KvLayout(PlanesOf(config), PlanePageBytes(config), kMappedPageBytes);
}

model::DeltaStateLayout StateLayoutOf(const model::ModelConfig& config) {
  return {config, PlanePageBytes(config), PlanesOf(config), kElementBytes};
}

}  // namespace dorad::cuda
