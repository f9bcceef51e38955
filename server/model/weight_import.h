// Reads a Hugging Face folder into a backend's weights: the tensors of a model's configuration, and
// one strict way to read them, for any storage. Torch-free. Thread-safe.
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

// The weight of the decoder that a tensor holds.
enum class WeightKind {
  kMatrix,  // of a module
  kBias,    // of a module
  // of a layer: before attention and MLP, after them (LayerSpec::output_norms), and of heads
  kAttentionNorm,
  kMlpNorm,
  kAttentionOutputNorm,
  kMlpOutputNorm,
  kQueryNorm,
  kKeyNorm,
  kFinalNorm,
  // of a delta-net: [qkv_size, 1, convolution], [value_heads] twice, [value_dim]
  kDeltaConvolution,
  kDeltaDecay,
  kDeltaTimeBias,
  kDeltaNorm,
  // of the tower: the patches' projection, the position table, and norms (two of each block, then
  // the mergers', then the patches', then the pooled patches')
  kPatchMatrix,
  kPatchBias,
  kPositionTable,
  kTowerNorm,
  kTowerNormBias,
  kProjection,  // of pooled patches: [width, hidden_size], without a module
};

struct WeightSlot {
  WeightKind kind = WeightKind::kMatrix;
  int index = 0;  // module id, layer or norm
  std::vector<int64_t> shape;
  DType dtype = DType::kF32;  // of the elements that a sink receives
  bool adds_one = false;      // the sink receives 1 + the checkpoint's elements

  int64_t num_elements() const;
};

// By Hugging Face name. A tied head has no slot.
using WeightSlots = std::map<std::string, WeightSlot>;

// Receives the weights. Several threads call Write at once, for different tensors.
class WeightSink {
 public:
  virtual ~WeightSink() = default;
  // All tensors to be written. Once, before the first block.
  virtual absl::Status Allocate(const WeightSlots& slots) = 0;
  // Elements of one tensor; the memory is the caller's.
  // Returns whether all elements are finite in the sink's storage, if they are in the file.
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
