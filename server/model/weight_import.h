// From a Hugging Face folder to a backend's weights: which tensors a model of a configuration has,
// and one strict way of reading them, whatever the storage. Torch-free. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/model/checkpoint.h"
#include "server/model/model_config.h"
#include "server/platform/files/safetensors_header.h"

namespace dorad::model {

// Which weight of the decoder a tensor is.
enum class WeightKind {
  kMatrix,  // of a module
  kBias,    // of a module
  // of a layer
  kInputNorm,
  kPostAttentionNorm,
  kQueryNorm,
  kKeyNorm,
  kFinalNorm,
};

struct WeightSlot {
  WeightKind kind = WeightKind::kMatrix;
  int index = 0;  // module id or layer
  std::vector<int64_t> shape;
  DType dtype = DType::kF32;  // of the checkpoint

  int64_t num_elements() const;
};

// By Hugging Face name. A tied head has no slot.
using WeightSlots = std::map<std::string, WeightSlot>;

// Where the weights go. Write is called by several threads at once, for different tensors.
class WeightSink {
 public:
  virtual ~WeightSink() = default;
  // All that will be written. Once, before the first block.
  virtual absl::Status Allocate(const WeightSlots& slots) = 0;
  // Elements of one tensor, as the checkpoint has them; the memory is the caller's. Returns whether
  // all of them are finite as they are stored, given that they are in the file.
  virtual absl::StatusOr<bool> Write(const WeightSlot& slot, int64_t first_element,
                                     absl::Span<const std::byte> block) = 0;
};

struct ImportedCheckpoint {
  std::string digest;  // Checkpoint::Digest
  int64_t num_parameters = 0;
  std::vector<DType> dtypes;  // of the modules' matrices in the checkpoint, by module id
  std::map<std::string, CheckpointTensor> tensors;  // all of the checkpoint
};

// INVALID_ARGUMENT listing every tensor that is missing, superfluous or of a wrong shape
// (MODEL_TENSOR_MISSING, _UNEXPECTED, _SHAPE; found before any data is read), else every one that
// is not finite in its storage (_NOT_FINITE); the sink's statuses and those of Checkpoint::Open.
absl::StatusOr<ImportedCheckpoint> ImportWeights(const std::string& dir, const ModelConfig& config,
                                                 WeightSink& sink);

// Whether an element is infinite or NaN.
bool HasNonFinite(absl::Span<const std::byte> elements, DType dtype);

}  // namespace dorad::model
