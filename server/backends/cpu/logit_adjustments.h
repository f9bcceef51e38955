// A row of logits after allowed tokens, biases and penalties. Torch-free. Pure and therefore
// thread-safe.
#pragma once

#include <vector>

#include "absl/types/span.h"
#include "server/engine/model_runner.h"

namespace dorad::engine {

// The row that `want` is sampled from. Bans are left to the sampling. REQUIRES: want.logits is set,
// its ids and those of want.uses are in the vocabulary.
std::vector<float> AdjustedLogits(absl::Span<const float> logits, const SampleWant& want);

}  // namespace dorad::engine
