#include "server/backends/backend.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/backends/cpu/adapter_builder.h"
#include "server/backends/cpu/host_copies.h"
#include "server/backends/cpu/kv_layout.h"
#include "server/backends/cpu/model.h"
#include "server/backends/cpu/model_runner.h"
#include "server/backends/cpu/ops/thread_team.h"
#include "server/backends/description.h"
#include "server/model/kv_groups.h"
#include "server/platform/error.h"
#include "server/platform/exception.h"
#include "server/platform/process/host_memory.h"

namespace dorad {
namespace {

// Any number of leases: sealed memory never changes and is never released.
class CpuLease final : public shared_memory::WeightsLease {
 public:
  CpuLease(const SealedMemory* memory, std::atomic<int>* leases)
      : memory_(*memory), leases_(*leases) {
    ++leases_;
  }
  ~CpuLease() override { --leases_; }

  absl::StatusOr<std::vector<UniqueFd>> Share(size_t first, size_t max) const override {
    std::vector<UniqueFd> pieces;
    if (first == 0 && max > 0) {
      DORAD_ASSIGN_OR_RETURN(UniqueFd piece, memory_.Share());
      pieces.push_back(std::move(piece));
    }
    return pieces;
  }

 private:
  const SealedMemory& memory_;
  std::atomic<int>& leases_;
};

// The size of the CPU's team of threads.
int Threads(const EngineConfig& config) {
  const int hardware = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return config.threads > 0 ? static_cast<int>(config.threads) : hardware;
}

// An automatic KV cache takes a quarter of the memory that is free once the weights are loaded.
constexpr int64_t kAutoKvDivisor = 4;

class CpuBackend final : public Backend {
 public:
  absl::Status Load(const Config& config, model::ModelConfig model_config) {
    // The server's own thread team does the heavy work; torch's threads would spin beside it.
    at::set_num_threads(1);
    ops::SetThreads(Threads(config.engine));
    const auto compute =
        config.model.compute_dtype == "bf16" ? ops::ComputeDType::kBF16 : ops::ComputeDType::kF32;
    const int64_t budget = config.adapters.norm_chunk_bytes;
    DORAD_ASSIGN_OR_RETURN(
        model_, model::LoadedModel::Load(
                    config.model.path, std::move(model_config), compute, ops::NormOptions{budget},
                    /*shareable=*/!config.server.shared_memory_socket.empty()));
    DORAD_RETURN_IF_ERROR(Describe(config, model_->config(), CpuKvSizes(config, model_->config()),
                                   AvailableHostMemory() / kAutoKvDivisor));
    info_.digest = model_->digest();
    info_.num_parameters = model_->num_parameters();
    info_.weight_bytes = model_->bytes();
    builder_ = adapter::MakeCpuAdapterBuilder(&model_->modules(), model_.get(),
                                              {budget, FactorsInBf16(config)});
    if (config.adapters.host_bytes > 0) {
      host_copies_ = adapter::MakeCpuHostCopies(config.adapters.host_bytes);
    }
    return absl::OkStatus();
  }

  const adapter::BaseModules& modules() const override { return model_->modules(); }
  adapter::AdapterBuilder* adapter_builder() override { return builder_.get(); }
  adapter::HostCopies* host_copies() override { return host_copies_.get(); }
  DeviceMemoryOpener device_memory_opener() override { return nullptr; }
  const model::WeightLayout* weight_layout() const override { return model_->layout(); }
  absl::StatusOr<std::unique_ptr<shared_memory::WeightsLease>> LeaseWeights() override {
    return std::make_unique<CpuLease>(&model_->memory(), &leases_);
  }
  int64_t shared_weight_bytes() const override {
    return leases_ > 0 ? static_cast<int64_t>(model_->memory().size()) : 0;
  }
  std::map<std::string, int64_t> memory_by_kind() const override {
    return {{"weights", info_.weight_bytes},
            {"kv", info_.kv_bytes},
            {"norms", model_->norm_cache_bytes()}};
  }
  std::optional<Device> device() const override { return std::nullopt; }
  int64_t SleepWeights() override { return 0; }
  absl::Status WakeWeights() override { return absl::OkStatus(); }
  void ReturnFreedMemory() override {}
  absl::StatusOr<std::unique_ptr<engine::ModelRunner>> MakeRunner() override {
    try {
      return engine::MakeCpuModelRunner(*model_, info_.kv_pages, info_.context_length);
    } catch (...) {
      return StatusOfException(
          absl::StrCat("allocating the ", info_.kv_bytes, " bytes of engine.kv_bytes"),
          "KV_ALLOCATION_FAILED");
    }
  }

 private:
  std::unique_ptr<model::LoadedModel> model_;
  std::unique_ptr<adapter::AdapterBuilder> builder_;
  std::unique_ptr<adapter::HostCopies> host_copies_;
  std::atomic<int> leases_{0};  // of the weights
};

}  // namespace

KvSizes CpuKvSizes(const Config& config, const model::ModelConfig& model) {
  const int64_t element_bytes = config.model.compute_dtype == "bf16" ? 2 : 4;
  return {engine::CpuKvPageBytes(model, element_bytes),
          {model::KvGroups(model).windows, engine::CpuStateLayout(model, element_bytes).pages(),
           config.engine.max_step_tokens}};
}

absl::StatusOr<std::unique_ptr<Backend>> LoadCpuBackend(const Config& config,
                                                        model::ModelConfig model) {
  auto backend = std::make_unique<CpuBackend>();
  DORAD_RETURN_IF_ERROR(backend->Load(config, std::move(model)));
  return backend;
}

}  // namespace dorad
