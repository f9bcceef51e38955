#include "server/backends/cuda/elements.h"

#include <cuda_fp16.h>

#include <cstdint>
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

// __float2bfloat16_rn without a branch, so that the compiler makes vectors of it: an image in fp32
// has millions of elements, and running requests wait meanwhile.
uint16_t RoundedBits(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>(is_nan ? 0x7fff : rounded);
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
      static_assert(sizeof(*out) == sizeof(uint16_t));
      ConvertAll<uint32_t>(bytes, reinterpret_cast<uint16_t*>(out), RoundedBits);
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
