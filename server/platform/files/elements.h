// Elements of safetensors files as numbers. Pure functions and therefore thread-safe.
#pragma once

#include <cstddef>

#include "absl/types/span.h"
#include "server/platform/files/safetensors.h"

namespace dorad {

// Exact. The file's bytes may be unaligned. `out` has as many elements as `bytes`.
void ToFloat(DType dtype, absl::Span<const std::byte> bytes, float* out);

}  // namespace dorad
