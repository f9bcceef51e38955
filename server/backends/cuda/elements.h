// Elements of safetensors files as numbers, on the host. Thread-safe.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/dora/compose.h"
#include "server/platform/files/safetensors.h"

namespace dorad::cuda {

// As the kernels call it.
kernels::FloatType TypeOf(DType dtype);

// Rounded to nearest even. The file's bytes may be unaligned. `out` has as many elements as
// `bytes`.
void ToBf16(DType dtype, absl::Span<const std::byte> bytes, __nv_bfloat16* out);

}  // namespace dorad::cuda
