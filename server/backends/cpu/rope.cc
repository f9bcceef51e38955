// Inverse frequencies as transformers computes them (modeling_rope_utils): in fp32, in the same
// order of operations. An angle is position x frequency, so at position 10⁵ one unit in the last
// place of a frequency already moves the angle by a hundredth. The powers use ATen, because its
// fp32 pow rounds differently from others.
#include <ATen/ops/from_blob.h>
#include <ATen/ops/pow.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "server/model/model_config.h"
#include "server/platform/check.h"

namespace dorad::model {
namespace {

using Floats = std::vector<float>;

// base ** (2i / dim).
Floats Powers(double base, int64_t dim) {
  Floats exponents(dim / 2);
  for (int64_t i = 0; i < dim / 2; ++i) {
    exponents[i] = static_cast<float>(2 * i) / static_cast<float>(dim);
  }
  const at::Tensor powers = at::pow(
      at::Scalar(base), at::from_blob(exponents.data(), {dim / 2}, at::TensorOptions(at::kFloat)));
  const float* data = powers.const_data_ptr<float>();
  return Floats(data, data + dim / 2);
}

Floats Reciprocals(Floats values) {
  for (float& value : values) value = 1.0f / value;
  return values;
}

void ScaleLlama3(const RopeConfig& rope, Floats& inverse) {
  const double original = static_cast<double>(rope.original_max_position);
  const float low = static_cast<float>(original / rope.low_freq_factor);
  const float high = static_cast<float>(original / rope.high_freq_factor);
  const float factor = static_cast<float>(rope.factor);
  const float width = static_cast<float>(rope.high_freq_factor - rope.low_freq_factor);
  for (float& f : inverse) {
    const float wavelength = (1.0f / f) * static_cast<float>(2.0 * std::numbers::pi);
    if (wavelength > low) {
      f = f / factor;
    } else if (wavelength >= high) {
      const float smooth = ((1.0f / wavelength) * static_cast<float>(original) -
                            static_cast<float>(rope.low_freq_factor)) /
                           width;
      f = (1.0f - smooth) * f / factor + smooth * f;
    }
  }
}

double YarnMscale(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double YarnAttentionScale(const RopeConfig& rope) {
  if (rope.attention_factor != 0.0) return rope.attention_factor;
  if (rope.mscale != 0.0 && rope.mscale_all_dim != 0.0) {
    return YarnMscale(rope.factor, rope.mscale) / YarnMscale(rope.factor, rope.mscale_all_dim);
  }
  return YarnMscale(rope.factor, 1.0);
}

// The dimension whose wavelength turns `rotations` times within the original context.
double YarnDimension(const RopeConfig& rope, double rotations, int64_t dim) {
  const double turns =
      static_cast<double>(rope.original_max_position) / (rotations * 2.0 * std::numbers::pi);
  return static_cast<double>(dim) * std::log(turns) / (2.0 * std::log(rope.theta));
}

Floats YarnInverse(const RopeConfig& rope, const Floats& powers, int64_t dim) {
  double low = YarnDimension(rope, rope.beta_fast, dim);
  double high = YarnDimension(rope, rope.beta_slow, dim);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(dim - 1));
  if (low == high) high += 0.001;
  const float width = static_cast<float>(high - low);
  Floats inverse(powers.size());
  for (size_t i = 0; i < powers.size(); ++i) {
    const float ramp =
        std::clamp((static_cast<float>(i) - static_cast<float>(low)) / width, 0.0f, 1.0f);
    const float extrapolated = 1.0f - ramp;
    const float scaled = 1.0f / (static_cast<float>(rope.factor) * powers[i]);
    inverse[i] = scaled * (1.0f - extrapolated) + 1.0f / powers[i] * extrapolated;
  }
  return inverse;
}

double LongRopeAttentionScale(const RopeConfig& rope) {
  if (rope.attention_factor != 0.0) return rope.attention_factor;
  if (rope.factor <= 1.0) return 1.0;
  return std::sqrt(1.0 + std::log(rope.factor) /
                             std::log(static_cast<double>(rope.original_max_position)));
}

// The base of dynamic NTK scaling; the plain one within the model's context.
double DynamicTheta(const RopeConfig& rope, int64_t length) {
  const double context = static_cast<double>(rope.original_max_position);
  const double longest = static_cast<double>(std::max(length, rope.original_max_position));
  const double dim = static_cast<double>(rope.width);
  return rope.theta *
         std::pow(rope.factor * longest / context - (rope.factor - 1.0), dim / (dim - 2.0));
}

}  // namespace

RopeFrequencies ComputeRopeFrequencies(const RopeConfig& rope, int64_t length) {
  const int64_t dim = rope.width;
  DORAD_CHECK(dim > 0 && dim % 2 == 0);
  const bool dynamic = rope.kind == RopeKind::kDynamicNtk;
  Floats powers = Powers(dynamic ? DynamicTheta(rope, length) : rope.theta, dim);
  double attention_scale = 1.0;
  Floats inverse;
  switch (rope.kind) {
    case RopeKind::kDefault:
    case RopeKind::kDynamicNtk:
      inverse = Reciprocals(std::move(powers));
      break;
    case RopeKind::kLinear:
      inverse = Reciprocals(std::move(powers));
      for (float& f : inverse) f /= static_cast<float>(rope.factor);
      break;
    case RopeKind::kLlama3:
      inverse = Reciprocals(std::move(powers));
      ScaleLlama3(rope, inverse);
      break;
    case RopeKind::kYarn:
      inverse = YarnInverse(rope, powers, dim);
      attention_scale = YarnAttentionScale(rope);
      break;
    case RopeKind::kLongRope: {
      const auto& factors =
          length > rope.original_max_position ? rope.long_factor : rope.short_factor;
      DORAD_CHECK(factors.size() == powers.size());
      for (size_t i = 0; i < powers.size(); ++i) powers[i] *= static_cast<float>(factors[i]);
      inverse = Reciprocals(std::move(powers));
      attention_scale = LongRopeAttentionScale(rope);
      break;
    }
  }
  return {std::vector<double>(inverse.begin(), inverse.end()), attention_scale};
}

void FillRopeTable(const RopeConfig& rope, int64_t positions, float* cos, float* sin) {
  const RopeFrequencies frequencies = ComputeRopeFrequencies(rope, positions);
  const int64_t half = rope.width / 2;
  const float scale = static_cast<float>(frequencies.attention_scale);
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(p) * static_cast<float>(frequencies.inverse[i]);
      cos[p * half + i] = std::cos(angle) * scale;
      sin[p * half + i] = std::sin(angle) * scale;
    }
  }
}

}  // namespace dorad::model
