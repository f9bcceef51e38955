#include "server/adapter/cpu_images.h"

#include <utility>

#include "server/adapter/version.h"

namespace dorad::adapter {
namespace {

class CpuWeightsImage final : public WeightsImage {
 public:
  explicit CpuWeightsImage(std::shared_ptr<const AdapterWeights> weights)
      : weights_(std::move(weights)) {}
  const std::shared_ptr<const AdapterWeights>& weights() const { return weights_; }

 private:
  const std::shared_ptr<const AdapterWeights> weights_;
};

class CpuWeightsImages final : public WeightsImages {
 public:
  explicit CpuWeightsImages(int64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}

  int64_t capacity_bytes() const override { return capacity_bytes_; }
  int64_t BytesFor(int64_t weights_bytes) const override { return weights_bytes; }
  absl::StatusOr<std::unique_ptr<const WeightsImage>> Save(
      const std::shared_ptr<const AdapterWeights>& weights) override {
    return std::make_unique<const CpuWeightsImage>(weights);
  }
  absl::StatusOr<std::shared_ptr<const AdapterWeights>> Restore(
      const WeightsImage& image) override {
    return static_cast<const CpuWeightsImage&>(image).weights();
  }

 private:
  const int64_t capacity_bytes_;
};

}  // namespace

std::unique_ptr<WeightsImages> MakeCpuWeightsImages(int64_t capacity_bytes) {
  return std::make_unique<CpuWeightsImages>(capacity_bytes);
}

}  // namespace dorad::adapter
