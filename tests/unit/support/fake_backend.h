// A backend without a model: it notes the calls that give memory back and take it again.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/adapter/publish/builder.h"
#include "server/backends/backend.h"

namespace dorad {

// Builds nothing.
class FakeBuilder final : public adapter::AdapterBuilder {
 public:
  using AdapterBuilder::AdapterBuilder;
  absl::StatusOr<adapter::BuiltAdapter> Build(const adapter::AdapterTensors&) override {
    return absl::UnimplementedError("a fake");
  }

 protected:
  absl::StatusOr<bool> EqualsBase(const adapter::BaseCopy&) const override { return true; }
};

// Thread-safe.
class FakeBackend final : public Backend {
 public:
  static constexpr int64_t kWeightBytes = 1000;

  const adapter::BaseModules& modules() const override { return modules_; }
  adapter::AdapterBuilder* adapter_builder() override { return &builder_; }
  adapter::HostCopies* host_copies() override { return nullptr; }
  DeviceMemoryOpener device_memory_opener() override { return nullptr; }
  const model::WeightLayout* weight_layout() const override { return nullptr; }
  absl::StatusOr<std::unique_ptr<shared_memory::WeightsLease>> LeaseWeights() override {
    return absl::UnimplementedError("a fake");
  }
  int64_t shared_weight_bytes() const override { return 0; }
  std::map<std::string, int64_t> memory_by_kind() const override { return {}; }
  std::optional<Device> device() const override {
    absl::MutexLock lock(&mu_);
    return device_;
  }
  int64_t SleepWeights() override {
    Note("sleep weights");
    if (throws) throw std::bad_alloc();
    return kWeightBytes;
  }
  absl::Status WakeWeights() override {
    Note("wake weights");
    absl::MutexLock lock(&mu_);
    return wake_status_;
  }
  void ReturnFreedMemory() override {
    Note("return freed memory");
    absl::MutexLock lock(&mu_);
    if (!device_) return;
    device_->free += device_->pooled;
    device_->pooled = 0;
  }
  absl::StatusOr<std::unique_ptr<engine::ModelRunner>> MakeRunner() override {
    return absl::UnimplementedError("a fake");
  }

  std::atomic<bool> throws{false};  // when the weights go to sleep

  void set_device(Device device) {
    absl::MutexLock lock(&mu_);
    device_ = device;
  }
  // What the next WakeWeights answer.
  void set_wake_status(absl::Status status) {
    absl::MutexLock lock(&mu_);
    wake_status_ = std::move(status);
  }
  std::vector<std::string> calls() const {
    absl::MutexLock lock(&mu_);
    return calls_;
  }
  // Waits until this call has come; false when it has not in half a minute.
  bool AwaitCall(const std::string& call) const {
    const auto has_come = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      return std::find(calls_.begin(), calls_.end(), call) != calls_.end();
    };
    absl::MutexLock lock(&mu_);
    return mu_.AwaitWithTimeout(absl::Condition(&has_come), absl::Seconds(30));
  }

 private:
  void Note(std::string call) {
    absl::MutexLock lock(&mu_);
    calls_.push_back(std::move(call));
  }

  const adapter::BaseModules modules_{{}};
  FakeBuilder builder_{&modules_};
  mutable absl::Mutex mu_;
  std::vector<std::string> calls_ ABSL_GUARDED_BY(mu_);
  absl::Status wake_status_ ABSL_GUARDED_BY(mu_);
  std::optional<Device> device_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad
