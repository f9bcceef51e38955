// The wire's names of dtypes. Pure functions and therefore thread-safe.
#pragma once

#include <optional>

#include "dorad/v1/adapters.pb.h"
#include "server/platform/files/safetensors_header.h"

namespace dorad::rpc {

inline std::optional<DType> ToDType(v1::TensorDtype dtype) {
  switch (dtype) {
    case v1::TENSOR_DTYPE_F32:
      return DType::kF32;
    case v1::TENSOR_DTYPE_F16:
      return DType::kF16;
    case v1::TENSOR_DTYPE_BF16:
      return DType::kBF16;
    default:
      return std::nullopt;
  }
}

}  // namespace dorad::rpc
