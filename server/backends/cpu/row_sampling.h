// The last stage of the CPU model runner: turns rows of logits into the engine's requested outputs.
// Torch stays in the .cc file. Thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "server/engine/model_runner.h"
#include "server/engine/step_batch.h"

namespace dorad::engine {

// Rows of logits that exist at once: bounds the memory of scoring a long prompt.
inline constexpr int64_t kLogitsRows = 64;

// logits: [rows.size(), vocab_size] fp32, row i of rows[i]. Fills the outputs of the rows'
// sequences, in the caller's order. May throw torch's exceptions.
void SampleRows(absl::Span<const WantedRow> rows, const float* logits, int64_t vocab_size,
                absl::Span<const StepSequence> sequences, std::vector<StepOutput>* outputs);
// The same for log-probabilities of targets. A sequence's rows are in order.
void ScoreRows(absl::Span<const WantedRow> rows, const float* logits, int64_t vocab_size,
               absl::Span<const StepSequence> sequences, std::vector<StepOutput>* outputs);

}  // namespace dorad::engine
