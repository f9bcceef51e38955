// Elements of safetensors files, and of pixels, as numbers. Pure functions and therefore
// thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "server/platform/files/safetensors.h"

namespace dorad {

// Exact. The file's bytes may be unaligned. `out` has as many elements as `bytes`.
void ToFloat(DType dtype, absl::Span<const std::byte> bytes, float* out);
// Rounded to nearest even; out: their bits.
void ToBf16(DType dtype, absl::Span<const std::byte> bytes, uint16_t* out);

}  // namespace dorad
