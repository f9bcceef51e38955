// The base model and its device, behind a header without torch: what App needs to build adapters
// and the engine on. Owned by App; outlives both. Thread-safe after Load.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/adapter/base_modules.h"
#include "server/base/config.h"
#include "server/engine/model_runner.h"

namespace dorad {

namespace adapter {
class BaseWeightSource;
}

class Backend {
 public:
  struct Info {
    std::string model_type;
    std::string name;  // the folder's
    std::string digest;
    int64_t vocab_size = 0;
    int64_t hidden_size = 0;
    int64_t num_layers = 0;
    int64_t context_length = 0;  // after model.max_context
    int64_t num_parameters = 0;
    std::vector<int32_t> eos_token_ids;
    int64_t kv_pages = 0;
    int64_t weight_bytes = 0;
    int64_t kv_bytes = 0;
  };

  // Reads the weights. Statuses of model::ReadModelConfig and LoadedModel::Load, and
  // INVALID_ARGUMENT (KV_TOO_SMALL, MAX_CONTEXT_OUT_OF_RANGE).
  static absl::StatusOr<std::unique_ptr<Backend>> Load(const Config& config);
  ~Backend();

  const Info& info() const;
  const adapter::BaseModules& modules() const;
  adapter::BaseWeightSource* base_weights();
  // Bytes of the base weights' cached squared norms so far.
  int64_t norm_bytes() const;
  // Allocates the KV cache. Once.
  std::unique_ptr<engine::ModelRunner> MakeRunner() const;

 private:
  struct Impl;
  explicit Backend(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dorad
