#include "server/backends/cpu/logit_adjustments.h"

#include <limits>

namespace dorad::engine {
namespace {

// The same steps as kernels/sampling/adjust.cuh: each one is rounded.
float Penalised(float x, uint32_t uses, const LogitParams& logits) {
  if (logits.repetition_penalty != 1.0f) {
    x = x > 0.0f ? x / logits.repetition_penalty : x * logits.repetition_penalty;
  }
  const uint32_t generated = uses / TokenUse::kGenerated;
  if (generated > 0) {
    const float by_count = logits.frequency_penalty * static_cast<float>(generated);
    x -= by_count;
    x -= logits.presence_penalty;
  }
  return x;
}

}  // namespace

std::vector<float> AdjustedLogits(absl::Span<const float> logits, const SampleWant& want) {
  const LogitParams& params = *want.logits;
  std::vector<float> row;
  if (params.allowed_ids.empty()) {
    row.assign(logits.begin(), logits.end());
  } else {
    row.assign(logits.size(), -std::numeric_limits<float>::infinity());
    for (const TokenId id : params.allowed_ids) row[id] = logits[id];
  }
  for (size_t i = 0; i < params.bias_ids.size(); ++i) row[params.bias_ids[i]] += params.biases[i];
  for (const TokenUse& use : want.uses) row[use.id] = Penalised(row[use.id], use.count, params);
  return row;
}

}  // namespace dorad::engine
