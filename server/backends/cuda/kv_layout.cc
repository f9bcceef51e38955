#include "server/backends/cuda/kv_layout.h"

#include <cuda_bf16.h>

#include "kernels/decoder/rows.h"
#include "server/backends/cuda/mapped_memory.h"
#include "server/model/kv_groups.h"

namespace dorad::cuda {
namespace {

constexpr int64_t kElementBytes = sizeof(__nv_bfloat16);

int64_t PlanePageBytes(const model::ModelConfig& config) {
  return config.kv_size() * kernels::kKvPageTokens * (config.fp8_kv ? 1 : kElementBytes);
}

// Of a page: one for each key and value head.
int64_t FactorBytes(const model::ModelConfig& config) {
  return 2 * config.num_kv_heads * kernels::kKvPageTokens * kElementBytes;
}
int64_t FactorsOfPlane(const model::ModelConfig& config) {
  return PlanePageBytes(config) / FactorBytes(config);
}

// In eight bits, up to a sixteenth more than are needed where that makes chunks smaller: a number
// of planes with few factors of two needs many pages for whole pieces of memory.
int64_t PlanesOf(const model::ModelConfig& config) {
  const int64_t slots = model::KvGroups(config).slots;
  if (!config.fp8_kv) return 2 * slots;
  const int64_t of_plane = FactorsOfPlane(config);
  const int64_t needed = 2 * slots + (slots + of_plane - 1) / of_plane;
  const auto chunk_pages = [&](int64_t planes) {
    return KvLayout(planes, PlanePageBytes(config), kMappedPageBytes).chunk_pages();
  };
  int64_t best = needed;
  for (int64_t planes = needed + 1; 16 * planes <= 17 * needed; ++planes) {
    if (chunk_pages(planes) < chunk_pages(best)) best = planes;
  }
  return best;
}

}  // namespace

int64_t KvPageBytes(const model::ModelConfig& config) {
  return PlanesOf(config) * PlanePageBytes(config);
}

int64_t MostKvBytes(const model::ModelConfig& config) {
  constexpr int64_t kMostRows = int64_t{1} << 31;
  const int64_t row_bytes = config.head_dim * (config.fp8_kv ? 1 : kElementBytes);
  // The spare pages, and the rest of the last chunk.
  return kMostRows * row_bytes - KvLayoutOf(config).chunk_bytes();
}

KvLayout KvLayoutOf(const model::ModelConfig& config) {
  return KvLayout(PlanesOf(config), PlanePageBytes(config), kMappedPageBytes);
}

FactorsPlace FactorsPlaceOf(const model::ModelConfig& config, int64_t slot) {
  const int64_t of_plane = FactorsOfPlane(config);
  return {2 * model::KvGroups(config).slots + slot / of_plane,
          slot % of_plane * FactorBytes(config)};
}

model::DeltaStateLayout StateLayoutOf(const model::ModelConfig& config) {
  return {config, PlanePageBytes(config), PlanesOf(config), kElementBytes};
}

}  // namespace dorad::cuda
