#include "server/backends/backend.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/backends/cuda/adapter_builder.h"
#include "server/backends/cuda/background_launch_queue.h"
#include "server/backends/cuda/decoder.h"
#include "server/backends/cuda/host_copies.h"
#include "server/backends/cuda/library_linear.h"
#include "server/backends/cuda/model.h"
#include "server/backends/cuda/model_runner.h"
#include "server/backends/cuda/peer_memory.h"
#include "server/backends/cuda/vision_encoder.h"
#include "server/backends/description.h"
#include "server/model/kv_groups.h"
#include "server/platform/error.h"

namespace dorad {
namespace {

// A launch's limit in its second and third dimensions.
constexpr int64_t kMostStepRows = 65535;

class CudaLease final : public shared_memory::WeightsLease {
 public:
  // Ends the lease that `model` has begun.
  explicit CudaLease(cuda::CudaModel* model) : model_(*model) {}
  ~CudaLease() override { model_.EndSharing(); }

  absl::StatusOr<std::vector<UniqueFd>> Share(size_t first, size_t max) const override {
    return model_.Share(first, max);
  }

 private:
  cuda::CudaModel& model_;
};

cuda::Priority ToPriority(const std::string& stream_priority) {
  if (stream_priority == "low") return cuda::Priority::kLow;
  return stream_priority == "normal" ? cuda::Priority::kNormal : cuda::Priority::kHigh;
}

absl::Status CheckWaterMarks(const MemoryConfig& memory, int64_t device_bytes) {
  if (ByteLimit(memory.low_water, device_bytes) <= ByteLimit(memory.high_water, device_bytes)) {
    return absl::OkStatus();
  }
  return MakeInvalid(
      "memory",
      {{"memory.low_water", "WATER_MARKS_CROSSED",
        absl::StrCat(memory.low_water, " is above memory.high_water, ", memory.high_water)}});
}

// For an automatic KV cache: the memory that weights and a reserve for adapters and workspace leave
// of the limit. Adapters beyond the reserve shrink the cache.
int64_t AutoKvBytes(const Config& config, const model::ModelConfig& model,
                    const cuda::DeviceMemory& memory) {
  constexpr int64_t kLeastReserve = int64_t{2} << 30;
  const int64_t limit = std::min(ByteLimit(config.memory.vram_limit, memory.total),
                                 memory.free - config.memory.reserve);
  const int64_t left = limit - cuda::CudaModel::BytesFor(model);
  const int64_t logits = config.engine.max_running_sequences * model.vocab_size * 4;
  const int64_t images = model.vision ? config.engine.image_cache_bytes : 0;
  const int64_t reserve =
      std::max({left / 8, kLeastReserve, config.adapters.resident_bytes}) + 2 * logits + images;
  return std::clamp<int64_t>(left - reserve, 0, cuda::MostKvBytes(model));
}

class CudaBackend final : public Backend {
 public:
  absl::Status Load(const Config& config, model::ModelConfig model_config) {
    DORAD_ASSIGN_OR_RETURN(const cuda::DeviceMemory memory, cuda::OpenDevice());
    DORAD_ASSIGN_OR_RETURN(const kernels::KernelIsa isa,
                           cuda::ChooseIsa(config.engine.instruction_set));
    info_.instruction_set = std::string(cuda::NameOf(isa));
    DORAD_RETURN_IF_ERROR(CheckWaterMarks(config.memory, memory.total));
    ledger_.set_limit(ByteLimit(config.memory.vram_limit, memory.total));
    ledger_.SetReserve(config.memory.reserve, cuda::MemoryOfDevice);
    ledger_.set_low_water(ByteLimit(config.memory.low_water, memory.total));
    const KvSizes kv_sizes = CudaKvSizes(config, model_config);
    DORAD_RETURN_IF_ERROR(
        Describe(config, model_config, kv_sizes, AutoKvBytes(config, model_config, memory)));
    info_.images.rounds_pixels = true;
    ledger_.SetGivesWay(
        {{"adapters", 0}, {"loading", 0}, {"kv", info_.kv_min_pages * kv_sizes.page_bytes}});
    const cuda::KvLayout kv = cuda::KvLayoutOf(model_config);
    info_.kv_bytes = kv.ChunksFor(info_.kv_pages + cuda::kSparePages) * kv.chunk_bytes();
    // Before the weights are read.
    DORAD_RETURN_IF_ERROR(ledger_.CheckPlan(
        {{"weights", cuda::CudaModel::BytesFor(model_config)}, {"kv", info_.kv_bytes}}, memory));
    DORAD_ASSIGN_OR_RETURN(gaps_, cuda::BackgroundLaunchQueue::Create());
    DORAD_ASSIGN_OR_RETURN(
        model_,
        cuda::CudaModel::Load(config.model.path, std::move(model_config), &ledger_,
                              /*shareable=*/!config.server.shared_memory_socket.empty(), isa));
    info_.digest = model_->digest();
    info_.num_parameters = model_->num_parameters();
    info_.weight_bytes = model_->bytes();
    DORAD_ASSIGN_OR_RETURN(builder_,
                           cuda::MakeCudaAdapterBuilder(model_.get(), gaps_.get(), &ledger_));
    if (config.memory.host_weights) DORAD_RETURN_IF_ERROR(model_->KeepHostCopy());
    if (config.adapters.host_bytes > 0) {
      DORAD_ASSIGN_OR_RETURN(host_copies_, cuda::MakeCudaHostCopies(
                                               model_.get(), config.adapters.host_bytes, &ledger_));
    }
    if (!config.server.shared_memory_socket.empty()) {
      DORAD_ASSIGN_OR_RETURN(peer_memories_, cuda::PeerMemories::Create());
    }
    engine_ = config.engine;
    return absl::OkStatus();
  }

  const adapter::BaseModules& modules() const override { return model_->modules(); }
  adapter::AdapterBuilder* adapter_builder() override { return builder_.get(); }
  adapter::HostCopies* host_copies() override { return host_copies_.get(); }
  DeviceMemoryOpener device_memory_opener() override {
    return [memories = peer_memories_.get()](
               absl::Span<const std::byte> ipc_handle, absl::Span<const std::byte> device_uuid,
               uint64_t size) { return memories->Open(ipc_handle, device_uuid, size); };
  }
  const model::WeightLayout* weight_layout() const override { return model_->layout(); }
  absl::StatusOr<std::unique_ptr<shared_memory::WeightsLease>> LeaseWeights() override {
    DORAD_RETURN_IF_ERROR(model_->BeginSharing());
    return std::make_unique<CudaLease>(model_.get());
  }
  int64_t shared_weight_bytes() const override { return model_->shared_bytes(); }
  std::map<std::string, int64_t> memory_by_kind() const override { return ledger_.by_kind(); }
  std::optional<Device> device() const override {
    const absl::StatusOr<cuda::DeviceMemory> memory = cuda::MemoryOfDevice();
    if (!memory.ok()) return std::nullopt;  // already logged
    const cuda::MemoryLedger::Refusals refusals = ledger_.refusals();
    return Device{memory->total,   memory->free,   memory->pooled,
                  ledger_.limit(), refusals.limit, refusals.reserve};
  }
  int64_t SleepWeights() override { return model_->Sleep(); }
  absl::Status WakeWeights() override { return model_->Wake(); }
  void ReturnFreedMemory() override { cuda::TrimFreedMemory(); }
  absl::StatusOr<std::unique_ptr<engine::ModelRunner>> MakeRunner() override {
    return cuda::MakeCudaModelRunner(
        model_.get(),
        {info_.kv_pages, info_.context_length, engine_.max_step_tokens,
         engine_.max_running_sequences, gaps_.get(), ToPriority(engine_.stream_priority)},
        &ledger_);
  }

 private:
  cuda::MemoryLedger ledger_;  // outlives all memory that it counts
  std::unique_ptr<cuda::CudaModel> model_;
  std::unique_ptr<cuda::BackgroundLaunchQueue> gaps_;
  std::unique_ptr<adapter::AdapterBuilder> builder_;
  std::unique_ptr<adapter::HostCopies> host_copies_;
  std::unique_ptr<cuda::PeerMemories> peer_memories_;  // nullptr: no shared-memory socket
  EngineConfig engine_;
};

}  // namespace

absl::StatusOr<std::string> FindGpu() { return cuda::FindGpu(); }

absl::Status CheckCudaConfig(const Config& config, const model::ModelConfig& model) {
  if (config.model.compute_dtype != "bf16" || !FactorsInBf16(config)) {
    return MakeInvalid("model", {{"model.compute_dtype", "COMPUTE_DTYPE_UNSUPPORTED",
                                  "a GPU computes in bf16: model.compute_dtype and "
                                  "adapters.dtype must be auto or bf16"}});
  }
  if (config.adapters.max_rank > cuda::kMaxRank) {
    return MakeInvalid("adapters", {{"adapters.max_rank", "MAX_RANK_UNSUPPORTED",
                                     absl::StrCat("on a GPU at most ", cuda::kMaxRank)}});
  }
  if (config.engine.max_step_tokens > kMostStepRows) {
    return MakeInvalid("engine", {{"engine.max_step_tokens", "MAX_STEP_TOKENS_UNSUPPORTED",
                                   absl::StrCat("on a GPU at most ", kMostStepRows)}});
  }
  DORAD_RETURN_IF_ERROR(cuda::CheckDecoder(model));
  if (const int64_t most = cuda::MostKvBytes(model); config.engine.kv_bytes > most) {
    return MakeInvalid("engine", {{"engine.kv_bytes", "KV_TOO_LARGE",
                                   absl::StrCat("on a GPU at most ", most, " for this model")}});
  }
  return absl::OkStatus();
}

absl::Status CheckCudaTower(const model::VisionConfig& vision) { return cuda::CheckTower(vision); }

KvSizes CudaKvSizes(const Config& config, const model::ModelConfig& model) {
  return {cuda::KvPageBytes(model),
          {model::KvGroups(model).windows, cuda::StateLayoutOf(model).pages(),
           config.engine.max_step_tokens}};
}

absl::StatusOr<std::unique_ptr<Backend>> LoadCudaBackend(const Config& config,
                                                         model::ModelConfig model) {
  auto backend = std::make_unique<CudaBackend>();
  DORAD_RETURN_IF_ERROR(backend->Load(config, std::move(model)));
  return backend;
}

}  // namespace dorad
