// The decoder of all supported families on the GPU: kernel launches over preallocated buffers.
// Differences between families are data: LayerSpec says what a layer computes. Owned by the runner;
// confined to the engine thread.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/decoder/attention.h"
#include "server/backends/cuda/batch.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/kv_image.h"
#include "server/backends/cuda/kv_layout.h"
#include "server/backends/cuda/kv_memory.h"
#include "server/backends/cuda/linear.h"
#include "server/backends/cuda/model.h"
#include "server/model/kv_groups.h"

namespace dorad::cuda {

// Why a GPU cannot run the model's decoder: INVALID_ARGUMENT (MODEL_UNSUPPORTED,
// KV_DTYPE_UNSUPPORTED).
absl::Status CheckDecoder(const model::ModelConfig& config);

// What a step's rows are, as far as attention's and the recurrence's kernels depend on it.
struct StepForm {
  bool single_rows = false;  // no sequence has more than one
  bool tiles = true;         // attention computes long runs of rows as tiles, if there may be any
  bool shares = false;       // attention reads common pages once, see SharesReads

  bool row_tiles() const { return tiles && !single_rows; }
};

class CudaDecoder {
 public:
  struct Options {
    int64_t kv_pages = 0;  // of the engine
    int64_t max_positions = 0;
    int64_t max_rows = 0;         // of one step
    int64_t max_logits_rows = 0;  // of one call of Logits
  };
  // model, ledger and stream are borrowed. OUT_OF_MEMORY names the memory that did not fit.
  static absl::StatusOr<std::unique_ptr<CudaDecoder>> Create(const CudaModel* model,
                                                             const Options& options,
                                                             MemoryLedger* ledger,
                                                             const Stream* stream);

  // Launches one forward pass: writes keys and values of all rows, keeps the last layer's residual.
  // by_group: for each group of layers (model::KvGroups), the same but for their pages. images:
  // rows that are tokens of images; a step of single rows has none.
  absl::Status Forward(absl::Span<const kernels::StepRows> by_group, const LinearRows& linear,
                       absl::Span<const ImageRows> images, const StepForm& form);
  // Launches the final norm and the head for some rows of the last Forward. Returns device memory
  // [rows, vocabulary] fp32, valid until the next call.
  absl::StatusOr<const float*> Logits(const LogitsBlock& block);

  // As engine::ModelRunner's. REQUIRES: no launched work is running.
  absl::StatusOr<int64_t> ReleaseKv(absl::Span<const int32_t> keep);
  absl::Status RestoreKv();
  // Maps and unmaps chunks, as engine::KvChunks.
  KvMemory& kv_memory() { return kv_memory_; }

  // Whether passes may be captured and replayed for other rows.
  bool is_capturable() const { return linear_.is_capturable(); }
  // kernels::LeastSharedPositions.
  int64_t least_shared_positions() const { return least_shared_positions_; }

 private:
  CudaDecoder(const CudaModel* model, const Options& options, const Stream* stream, Linear linear)
      : model_(*model),
        groups_(model->config()),
        states_(StateLayoutOf(model->config())),
        options_(options),
        stream_(*stream),
        linear_(std::move(linear)) {}

  absl::Status AllocateAll(MemoryLedger* ledger);
  absl::Status UploadRope();
  // A layer's mixer, from normed_ to delta_. rows: of the layer's group. number: of the model's
  // delta-nets.
  absl::Status Attention(int64_t layer, const model::KvGroups::Place& place,
                         const kernels::StepRows& rows, const LinearRows& linear,
                         const StepForm& form);
  absl::Status Delta(int64_t layer, int64_t number, const kernels::StepRows& rows,
                     const LinearRows& linear, const StepForm& form);
  absl::Status Mlp(int64_t layer, const LinearRows& linear);
  // Replaces the embeddings of images.
  absl::Status EmbedImages(absl::Span<const ImageRows> images);
  // Adds the images' features for the layer to its last addend (DeepStack).
  absl::Status AddFeatures(int64_t layer, absl::Span<const ImageRows> images);
  absl::Status PlanAttention(absl::Span<const kernels::StepRows> rows, const StepForm& form);
  // Adds delta_ (normed with delta_weight, if not null) to the residual unless `first`, and norms
  // the residual with `weight`.
  absl::Status Norm(int64_t rows, bool first, const float* delta_weight, const float* weight);
  absl::Status Activate(int64_t layer, int64_t rows);
  kernels::AttentionShape Shape() const;

  const CudaModel& model_;
  const model::KvGroups groups_;
  const model::DeltaStateLayout states_;
  const Options options_;
  const Stream& stream_;
  Linear linear_;
  int64_t least_shared_positions_ = 0;
  KvMemory kv_memory_;
  KvImage kv_image_;  // while it is released
  DeviceBuffer workspace_;
  std::vector<kernels::KvCache> kv_;  // by the layers of a page
  // The plan of a step's attention for each group of layers.
  std::vector<kernels::AttentionWorkspace> plans_;
  // Parts of the workspace.
  struct RopeTable {
    float* cos = nullptr;  // [max_positions, width / 2]
    float* sin = nullptr;
    uint8_t* axes = nullptr;  // [width / 2]; null: one position turns all
  };
  std::vector<RopeTable> ropes_;     // as ModelConfig::ropes
  float* residual_ = nullptr;        // [max_rows, hidden]
  __nv_bfloat16* normed_ = nullptr;  // [max_rows, hidden]
  __nv_bfloat16* wide_ = nullptr;    // [max_rows, the widest of qkv, qkvz and gate_up]
  __nv_bfloat16* narrow_ = nullptr;  // [max_rows, the widest input of o, out and down]
  float* delta_ = nullptr;           // [max_rows, hidden]: the output of these
  __nv_bfloat16* q_ = nullptr;       // [max_rows, heads · head_dim]
  float* mixed_ = nullptr;           // [max_rows, qkv_size], as factors_ with delta-nets
  float* factors_ = nullptr;         // [max_rows, 2 value_heads]
  float* logits_ = nullptr;          // [max_logits_rows, vocabulary]
};

}  // namespace dorad::cuda
