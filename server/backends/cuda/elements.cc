#include "server/backends/cuda/elements.h"

#include "server/platform/check.h"

namespace dorad::cuda {

kernels::FloatType TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return kernels::FloatType::kF32;
    case DType::kF16:
      return kernels::FloatType::kF16;
    case DType::kBF16:
      return kernels::FloatType::kBF16;
  }
  DORAD_CHECK(false);
}

}  // namespace dorad::cuda
