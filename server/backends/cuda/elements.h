// Elements of safetensors files as the kernels call them. Thread-safe.
#pragma once

#include "kernels/dora/compose.h"
#include "server/platform/files/safetensors.h"

namespace dorad::cuda {

kernels::FloatType TypeOf(DType dtype);

}  // namespace dorad::cuda
