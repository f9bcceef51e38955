#include "server/backends/cpu/simd/logits.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "server/backends/cpu/simd/kernels.h"
#include "server/platform/check.h"

namespace dorad::ops::cpu {
namespace {

constexpr int64_t kSumBlock = 1024;
constexpr float kInfinity = __builtin_inff();

}  // namespace

LogitRow::LogitRow(absl::Span<const float> logits, float temperature,
                   absl::Span<const int32_t> banned)
    : logits_(logits) {
  const Kernels& kernels = ActiveKernels();
  const int64_t count = size();
  maxima_.resize((count + kLogitBlock - 1) / kLogitBlock);
  LogitStats stats = kernels.block_max(logits.data(), count, maxima_.data());
  usable_ = stats.finite && stats.maximum > -kInfinity;
  if (usable_ && (temperature != 1.0f || !banned.empty())) {
    own_.resize(count);
    if (temperature != 1.0f) {
      // Subtracts the maximum first, so that a small temperature cannot overflow.
      kernels.divide(logits.data(), count, stats.maximum, temperature, own_.data());
    } else {
      std::copy(logits.begin(), logits.end(), own_.begin());
    }
    for (int32_t id : banned) {
      DORAD_CHECK(id >= 0 && id < count);
      own_[id] = -kInfinity;
    }
    logits_ = own_;
    stats = kernels.block_max(own_.data(), count, maxima_.data());
    usable_ = stats.maximum > -kInfinity;
  }
  maximum_ = stats.maximum;
}

int32_t LogitRow::ArgMax() const {
  const auto block = std::find(maxima_.begin(), maxima_.end(), maximum_);
  DORAD_CHECK(block != maxima_.end());
  const auto begin = logits_.begin() + (block - maxima_.begin()) * kLogitBlock;
  return static_cast<int32_t>(std::find(begin, logits_.end(), maximum_) - logits_.begin());
}

void LogitRow::SumExp(bool keep) {
  const Kernels& kernels = ActiveKernels();
  if (keep) {
    terms_.resize(logits_.size());
    sums_.clear();
  }
  total_ = 0.0;
  for (int64_t begin = 0; begin < size(); begin += kSumBlock) {
    const double sum = kernels.sum_exp(logits_.data() + begin, std::min(kSumBlock, size() - begin),
                                       maximum_, keep ? terms_.data() + begin : nullptr);
    if (keep) sums_.push_back(sum);
    total_ += sum;
  }
  log_total_ = std::log(total_);
}

float LogitRow::LogProb(float logit) const {
  return static_cast<float>(static_cast<double>(logit) - static_cast<double>(maximum_) -
                            log_total_);
}

int32_t LogitRow::Find(double target) const {
  int64_t begin = 0;
  double before = 0.0;
  for (double sum : sums_) {
    if (before + sum > target) break;
    before += sum;
    begin += kSumBlock;
  }
  const int64_t end = std::min(begin + kSumBlock, size());
  for (int64_t i = begin; i < end; ++i) {
    before += terms_[i];
    if (before > target) return static_cast<int32_t>(i);
  }
  // Rounding: the block's terms may add up to slightly less than its sum. Takes its last possible
  // id.
  for (int64_t i = end - 1; i >= 0; --i) {
    if (terms_[i] > 0.0f) return static_cast<int32_t>(i);
  }
  return ArgMax();
}

std::vector<Candidate> LogitRow::AtLeast(float bound) const {
  std::vector<Candidate> found;
  for (size_t block = 0; block < maxima_.size(); ++block) {
    if (!(maxima_[block] >= bound)) continue;
    const int64_t begin = static_cast<int64_t>(block) * kLogitBlock;
    const int64_t end = std::min(begin + kLogitBlock, size());
    for (int64_t i = begin; i < end; ++i) {
      if (logits_[i] >= bound) found.push_back({logits_[i], static_cast<int32_t>(i)});
    }
  }
  return found;
}

std::vector<Candidate> LogitRow::Top(int64_t k) const {
  k = std::min(k, size());
  if (k <= 0) return {};
  // At least k logits reach the k-th largest block maximum.
  float bound = -kInfinity;
  if (k <= static_cast<int64_t>(maxima_.size())) {
    std::vector<float> maxima = maxima_;
    std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<>());
    bound = maxima[k - 1];
  }
  std::vector<Candidate> found = AtLeast(bound);
  std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), Before);
  found.resize(k);
  std::sort(found.begin(), found.end(), Before);
  return found;
}

}  // namespace dorad::ops::cpu
