#include "server/backends/cuda/elements.h"

#include <cuda_fp16.h>

#include <cstring>

#include "server/platform/check.h"

namespace dorad::cuda {
namespace {

template <typename From, typename To, typename Convert>
void ConvertAll(absl::Span<const std::byte> bytes, To* out, Convert convert) {
  const size_t count = bytes.size() / sizeof(From);
  for (size_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, bytes.data() + i * sizeof(From), sizeof(From));
    out[i] = convert(value);
  }
}

}  // namespace

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

void ToBf16(DType dtype, absl::Span<const std::byte> bytes, __nv_bfloat16* out) {
  switch (dtype) {
    case DType::kF32:
      ConvertAll<float>(bytes, out, [](float value) { return __float2bfloat16_rn(value); });
      return;
    case DType::kF16:
      ConvertAll<__half>(bytes, out,
                         [](__half value) { return __float2bfloat16_rn(__half2float(value)); });
      return;
    case DType::kBF16:
      std::memcpy(out, bytes.data(), bytes.size());
      return;
  }
}

}  // namespace dorad::cuda
