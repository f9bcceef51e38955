#include "server/backends/cpu/host_copies.h"

#include <utility>

#include "server/adapter/registry/version.h"

namespace dorad::adapter {
namespace {

class CpuHostCopy final : public HostCopy {
 public:
  explicit CpuHostCopy(std::shared_ptr<const AdapterWeights> weights)
      : weights_(std::move(weights)) {}
  const std::shared_ptr<const AdapterWeights>& weights() const { return weights_; }

 private:
  const std::shared_ptr<const AdapterWeights> weights_;
};

class CpuHostCopies final : public HostCopies {
 public:
  explicit CpuHostCopies(int64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}

  int64_t capacity_bytes() const override { return capacity_bytes_; }
  int64_t BytesFor(int64_t weights_bytes) const override { return weights_bytes; }
  absl::StatusOr<std::unique_ptr<const HostCopy>> Save(
      const std::shared_ptr<const AdapterWeights>& weights) override {
    return std::make_unique<const CpuHostCopy>(weights);
  }
  absl::StatusOr<std::shared_ptr<const AdapterWeights>> Restore(const HostCopy& image) override {
    return static_cast<const CpuHostCopy&>(image).weights();
  }

 private:
  const int64_t capacity_bytes_;
};

}  // namespace

std::unique_ptr<HostCopies> MakeCpuHostCopies(int64_t capacity_bytes) {
  return std::make_unique<CpuHostCopies>(capacity_bytes);
}

}  // namespace dorad::adapter
