// Draws a token from a row of logits by its noise (noise.h). Thread-safe.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "server/backends/cpu/ops/noise.h"
#include "server/backends/cpu/simd/logits.h"

namespace dorad::ops {

// From all ids. REQUIRES: row.usable().
int32_t Draw(const cpu::LogitRow& row, const Noise& noise);

// From the row's first candidates, in order: at least one.
int32_t Draw(const cpu::LogitRow& row, absl::Span<const cpu::Candidate> candidates,
             const Noise& noise);

}  // namespace dorad::ops
