// The base model and its device, behind a header without torch and CUDA: the basis of adapters and
// of the engine. Owned by App; outlives both. Thread-safe after Load.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/adapter/peft/base_modules.h"
#include "server/adapter/peft/peer_tensors.h"
#include "server/adapter/publish/builder.h"
#include "server/adapter/residency/host_copies.h"
#include "server/backends/weights_lease.h"
#include "server/engine/kv_needs.h"
#include "server/engine/model_runner.h"
#include "server/model/model_config.h"
#include "server/model/weight_layout.h"
#include "server/platform/config/config.h"

namespace dorad {

// Of the KV cache.
struct KvSizes {
  int64_t page_bytes = 0;
  engine::KvNeeds needs;  // of a sequence
};

class Backend {
 public:
  struct Info {
    std::string model_type;
    std::string name;  // the folder's
    std::string digest;
    std::string instruction_set;  // of a GPU's kernels: "sm90" or "mma"; empty on the CPU
    int64_t vocab_size = 0;
    int64_t hidden_size = 0;
    int64_t num_layers = 0;
    int64_t context_length = 0;  // after model.max_context
    int64_t num_parameters = 0;
    std::vector<int32_t> image_token_ids;
    engine::ImageLimits images;  // without the request's limits
    std::vector<int32_t> eos_token_ids;
    int64_t kv_pages = 0;
    int64_t kv_min_pages = 0;  // memory.kv_min_bytes
    int64_t weight_bytes = 0;
    int64_t kv_bytes = 0;
    int64_t whole_context_kv_bytes = 0;  // engine.kv_bytes for one request of context_length
  };

  // The device of model.device auto, and the reason for the choice: the first GPU if the kernels
  // support it, else the CPU. Cached after the first call.
  struct DeviceChoice {
    std::string name;  // "cuda" or "cpu"
    std::string reason;
  };
  static const DeviceChoice& ChooseDevice();
  // The model of config.model.path, without a tower that the device does not serve: images are
  // refused then. model::ReadModelConfig's statuses.
  static absl::StatusOr<model::ModelConfig> ReadModel(const Config& config);
  // Reads the weights for model.device. Statuses of model::ReadModelConfig and of the device's
  // loading, and INVALID_ARGUMENT (KV_TOO_SMALL, KV_TOO_LARGE, MAX_CONTEXT_OUT_OF_RANGE,
  // DEVICE_NOT_BUILT, WATER_MARKS_CROSSED, INSTRUCTION_SET_UNSUPPORTED, KV_DTYPE_UNSUPPORTED,
  // OUT_OF_MEMORY: a KV cache that the host can never hold).
  static absl::StatusOr<std::unique_ptr<Backend>> Load(const Config& config);
  // The checks of Load that need neither device nor weights; same statuses.
  static absl::Status Check(const Config& config);
  virtual ~Backend() = default;

  const Info& info() const { return info_; }
  virtual const adapter::BaseModules& modules() const = 0;
  virtual adapter::AdapterBuilder* adapter_builder() = 0;
  // nullptr without adapters.host_bytes.
  virtual adapter::HostCopies* host_copies() = 0;
  // Opens GPU memory of another process: its CUDA IPC handle, the GPU's UUID, bytes. Statuses of
  // cuda::PeerMemories::Open.
  using DeviceMemoryOpener =
      std::function<absl::StatusOr<std::shared_ptr<const adapter::PeerMemory>>(
          absl::Span<const std::byte>, absl::Span<const std::byte>, uint64_t)>;
  // nullptr without a GPU.
  virtual DeviceMemoryOpener device_memory_opener() = 0;
  // Addresses of the base weights for leases; nullptr without a shared-memory socket.
  virtual const model::WeightLayout* weight_layout() const = 0;
  // Leases the base weights to another process: while a lease lives, their memory is neither
  // written nor released. UNAVAILABLE (SERVER_SLEEPING). REQUIRES: weight_layout() != nullptr.
  virtual absl::StatusOr<std::unique_ptr<shared_memory::WeightsLease>> LeaseWeights() = 0;
  // The weights' memory while it is leased; else 0.
  virtual int64_t shared_weight_bytes() const = 0;
  // Bytes held by the backend, by purpose; without adapters if only the registry counts those.
  virtual std::map<std::string, int64_t> memory_by_kind() const = 0;
  // Memory of a device that other processes use, too. nullopt: the data lies in host memory.
  struct Device {
    int64_t total = 0;
    int64_t free = 0;
    int64_t pooled = 0;  // freed by this server, but kept in its pool
    int64_t limit = 0;   // of this server
    // Refused growth because of the limit, and because of other processes' memory.
    int64_t refused_by_limit = 0;
    int64_t refused_by_reserve = 0;
  };
  virtual std::optional<Device> device() const = 0;
  // Releases the base weights' device memory, and allocates it again. Returns 0 bytes if they lie
  // in host memory or are leased: leased weights are released when the last lease ends during
  // sleep. Statuses of cuda::CudaModel::Wake. REQUIRES: the engine sleeps.
  virtual int64_t SleepWeights() = 0;
  virtual absl::Status WakeWeights() = 0;
  // Returns pooled memory to the device for other processes.
  virtual void ReturnFreedMemory() = 0;
  // Allocates the KV cache. Once. RESOURCE_EXHAUSTED (OUT_OF_MEMORY) or the device's statuses.
  virtual absl::StatusOr<std::unique_ptr<engine::ModelRunner>> MakeRunner() = 0;

 protected:
  // For every backend's Load: fills info(), except fields that need the weights.
  absl::Status Describe(const Config& config, const model::ModelConfig& model, const KvSizes& kv,
                        int64_t kv_available);

  Info info_;
};

// The Load of each device. REQUIRES: model is that of config.model.path.
absl::StatusOr<std::unique_ptr<Backend>> LoadCpuBackend(const Config& config,
                                                        model::ModelConfig model);
absl::StatusOr<std::unique_ptr<Backend>> LoadCudaBackend(const Config& config,
                                                         model::ModelConfig model);
// The name of the GPU that LoadCudaBackend would use. FAILED_PRECONDITION (DEVICE_UNAVAILABLE).
absl::StatusOr<std::string> FindGpu();
// INVALID_ARGUMENT (COMPUTE_DTYPE_UNSUPPORTED, MAX_RANK_UNSUPPORTED, MAX_STEP_TOKENS_UNSUPPORTED,
// MODEL_UNSUPPORTED, KV_DTYPE_UNSUPPORTED, KV_TOO_LARGE).
absl::Status CheckCudaConfig(const Config& config, const model::ModelConfig& model);
// Why a GPU does not serve the tower: INVALID_ARGUMENT (MODEL_UNSUPPORTED).
absl::Status CheckCudaTower(const model::VisionConfig& vision);
KvSizes CpuKvSizes(const Config& config, const model::ModelConfig& model);
KvSizes CudaKvSizes(const Config& config, const model::ModelConfig& model);

}  // namespace dorad
