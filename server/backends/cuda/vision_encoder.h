// Makes an image's patches into rows for the decoder, with the tower of model::VisionConfig, in
// pieces of about a millisecond between steps. Owned by the runner; confined to the engine thread.
//
// Guarantee: the result depends on the image, its grid and the adapter only, to the last bit: an
// image is computed alone, in chunks of rows that its size fixes.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/vision/attention.h"
#include "kernels/vision/pointwise.h"
#include "server/backends/cuda/adapter.h"
#include "server/backends/cuda/adapter_slots.h"
#include "server/backends/cuda/batch.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/image_features.h"
#include "server/backends/cuda/linear.h"
#include "server/backends/cuda/model.h"
#include "server/backends/cuda/vision_plan.h"
#include "server/backends/cuda/vision_rows.h"
#include "server/engine/images.h"

namespace dorad::cuda {

// Why this GPU cannot run the model's tower: INVALID_ARGUMENT (MODEL_UNSUPPORTED).
absl::Status CheckTower(const model::VisionConfig& vision);

class VisionEncoder {
 public:
  // All are borrowed. REQUIRES: model->config().vision, CheckTower.
  static absl::StatusOr<std::unique_ptr<VisionEncoder>> Create(const CudaModel* model,
                                                               AdapterSlots* slots,
                                                               MemoryLedger* ledger,
                                                               const Stream* stream);

  // Computes the image's next piece and waits for it; nullptr: there are more. Another image than
  // in the last call starts from its begin. adapter: nullptr for the base model.
  absl::StatusOr<std::shared_ptr<const CudaImageFeatures>> Encode(
      const engine::Image& image, const CudaAdapterWeights* adapter);
  // Forgets the pieces of an image.
  void Stop() { work_.reset(); }

 private:
  enum class Stage { kEmbed, kProject, kAttend, kMergeDeepstack, kMerge };

  // The image that is being computed.
  struct Work {
    engine::TokenId image = 0;  // engine::Image::key
    uint64_t adapter = 0;       // CudaAdapterWeights::id; 0: base
    model::ImageGrid grid;
    int64_t patches = 0;
    int64_t chunk_rows = 0;  // of one product
    // Of VisionPlan.
    std::vector<int32_t> tokens, frame_begins, window_begins;
    DeviceBuffer features;
    Stage stage = Stage::kEmbed;
    int64_t block = 0;
    int64_t chunk = 0;
    size_t deepstack = 0;  // the next of VisionConfig::deepstack
  };
  // Patches [begin, begin + rows) of it.
  struct Chunk {
    int64_t begin = 0;
    int64_t rows = 0;
  };
  // Where memory_ has what pieces read and write.
  struct Buffers {
    __nv_bfloat16* pixels = nullptr;  // [chunk, patch elements]
    float* residual = nullptr;        // [patches, width]
    __nv_bfloat16* qkv = nullptr;     // [patches, 3 width]
    __nv_bfloat16* normed = nullptr;  // [chunk, width]: also attention's output
    __nv_bfloat16* wide = nullptr;    // inputs of an activation, or of a merger's product
    __nv_bfloat16* gated = nullptr;   // [chunk, inner], with a gate
    float* delta = nullptr;           // [chunk, width], or a merger's tokens
    // VisionPlan.
    kernels::PatchTaps* taps = nullptr;
    float* cos = nullptr;
    float* sin = nullptr;
    kernels::SegmentTile* frame_tiles = nullptr;
    kernels::SegmentTile* window_tiles = nullptr;
    int32_t* tokens = nullptr;
  };

  VisionEncoder(const CudaModel* model, AdapterSlots* slots, MemoryLedger* ledger,
                const Stream* stream, Linear linear)
      : vision_(*model->config().vision),
        tower_(model->tower()),
        ledger_(ledger),
        stream_(*stream),
        linear_(std::move(linear)),
        rows_(vision_, slots, ledger, stream) {}

  absl::Status Start(const engine::Image& image);
  // Allocates for the image and writes the plan.
  absl::Status Prepare(Work* work);
  absl::Status RunUnit(const engine::Image& image);
  // Moves to the next unit; false: there is none.
  bool Next();
  // Of the current unit, against the limit of a piece.
  double Cost() const;
  double Operations() const;
  int64_t RowsOfChunk() const;
  Chunk CurrentChunk() const;

  void CopyPixels(const engine::Image& image, const Chunk& chunk);
  absl::Status Embed(const engine::Image& image, const Chunk& chunk);
  absl::Status Project(const TowerWeights::Block& block, const Chunk& chunk);
  absl::Status Attention(const Chunk& chunk);
  absl::StatusOr<const __nv_bfloat16*> Activate(int64_t rows);
  absl::Status Attend(const TowerWeights::Block& block, const Chunk& chunk);
  absl::Status Merge(const TowerWeights::Merger& merger, bool deepstack, int64_t level,
                     const Chunk& chunk);
  // In its place, of TowerStyle::pools_patches.
  absl::Status Pool(const TowerWeights::Merger& merger, const Chunk& chunk);
  float* Features(int64_t level) const;
  absl::Status Norm(const TowerNormWeights& weights, int64_t rows, int64_t size, double eps,
                    float* residual, const float* delta);

  const model::VisionConfig& vision_;
  const TowerWeights& tower_;
  MemoryLedger* const ledger_;
  const Stream& stream_;
  Linear linear_;
  VisionRows rows_;  // of the current call
  std::optional<Work> work_;
  PinnedBuffer host_;    // the plan of an image, or a chunk of its pixels
  DeviceBuffer memory_;  // for the largest image so far
  Buffers buffers_;
};

}  // namespace dorad::cuda
