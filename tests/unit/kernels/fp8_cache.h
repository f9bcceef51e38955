// A cache in eight bits on the host, by its definition (kernels/decoder/attention_fp8.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/decoder/attention.h"
#include "tests/unit/kernels/device.h"

namespace dorad::kernels {

enum Kind { kKey, kValue };

class Fp8Cache {
 public:
  Fp8Cache(const AttentionShape& shape, int64_t pages)
      : shape_(shape),
        factors_(pages * PageBytes() / 2, __ushort_as_bfloat16(0xFFFF)),
        codes_{std::vector<uint8_t>(pages * PageBytes(), 0xFF),
               std::vector<uint8_t>(pages * PageBytes(), 0xFF)} {}

  // Replaces a head of a position, head_dim numbers, by what the cache then stands for.
  void Put(Kind kind, int64_t page, int head, int place, float* x) {
    float most = 0.0f;
    for (int d = 0; d < shape_.head_dim; ++d) most = std::max(most, std::abs(x[d]));
    const int scale =
        std::clamp(static_cast<int>(std::ceil(std::log2(double{most} / 448.0))), -100, 7);
    factors_[FactorAt(kind, page, head, place)] = __float2bfloat16(std::ldexp(1.0f, 120 + scale));
    for (int d = 0; d < shape_.head_dim; ++d) {
      codes_[kind][CodeAt(page, head, place, d)] =
          __nv_cvt_float_to_fp8(std::ldexp(x[d], -scale), __NV_SATFINITE, __NV_E4M3);
      x[d] = Get(kind, page, head, place, d);
    }
  }
  float Get(Kind kind, int64_t page, int head, int place, int d) const {
    const float factor = __bfloat162float(factors_[FactorAt(kind, page, head, place)]);
    return static_cast<float>(Code(kind, page, head, place, d)) * (factor * 0x1p-120f);
  }
  __nv_fp8_e4m3 Code(Kind kind, int64_t page, int head, int place, int d) const {
    __nv_fp8_e4m3 code;
    code.__x = codes_[kind][CodeAt(page, head, place, d)];
    return code;
  }

  // For kernels in the emulator.
  KvCache OnHost() {
    return {reinterpret_cast<__nv_bfloat16*>(codes_[kKey].data()),
            reinterpret_cast<__nv_bfloat16*>(codes_[kValue].data()), factors_.data()};
  }

  // Two codes for each bf16, as KvCache has them.
  std::vector<__nv_bfloat16> Codes(Kind kind) const {
    const auto* const begin = reinterpret_cast<const __nv_bfloat16*>(codes_[kind].data());
    return {begin, begin + codes_[kind].size() / 2};
  }
  const std::vector<__nv_bfloat16>& factors() const { return factors_; }
  int64_t FactorAt(Kind kind, int64_t page, int head, int place) const {
    return page * PageBytes() / 2 + (2 * head + kind) * kKvPageTokens + place;
  }

  // Copies to the device, and back.
  class OnDevice {
   public:
    explicit OnDevice(const Fp8Cache& from)
        : k_(from.codes_[kKey]), v_(from.codes_[kValue]), factors_(from.factors_) {}
    KvCache cache() const {
      return {reinterpret_cast<__nv_bfloat16*>(k_.get()),
              reinterpret_cast<__nv_bfloat16*>(v_.get()), factors_.get()};
    }
    void Read(Fp8Cache* to) const {
      to->codes_[kKey] = k_.Read();
      to->codes_[kValue] = v_.Read();
      to->factors_ = factors_.Read();
    }

   private:
    DeviceBuffer<uint8_t> k_, v_;
    DeviceBuffer<__nv_bfloat16> factors_;
  };

 private:
  int64_t PageBytes() const { return int64_t{shape_.kv_heads} * kKvPageTokens * shape_.head_dim; }
  // Of each 16 elements i and i + 8 are neighbours.
  int64_t CodeAt(int64_t page, int head, int place, int d) const {
    return ((page * shape_.kv_heads + head) * kKvPageTokens + place) * shape_.head_dim +
           d / 16 * 16 + d % 8 * 2 + d % 16 / 8;
  }
  AttentionShape shape_;
  std::vector<__nv_bfloat16> factors_;
  std::vector<uint8_t> codes_[2];
};

}  // namespace dorad::kernels
