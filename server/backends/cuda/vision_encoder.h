// Makes the patches of images into rows for the decoder, with the tower of model::VisionConfig:
// several images together, or one in pieces of about a millisecond between steps. Owned by the
// runner; confined to the engine thread.
//
// Guarantee: the result depends on the image, its grid and the adapter only, to the last bit. With
// shapes that the fused kernel does not support an image is computed alone, in chunks of rows that
// its size fixes.
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

  using Features = std::shared_ptr<const CudaImageFeatures>;

  // As engine::ModelRunner::EncodeImages; waits for what it computes.
  absl::StatusOr<std::vector<Features>> Encode(absl::Span<const engine::Image* const> images,
                                               const CudaAdapterWeights* adapter, bool alone);
  // Forgets the pieces of images.
  void Stop() { work_.reset(); }

 private:
  // Patches whose pixels are copied at once.
  static constexpr int64_t kPixelRows = 1024;

  enum class Stage { kEmbed, kProject, kAttend, kMergeDeepstack, kMerge };

  // One of the images that are being computed.
  struct Part {
    engine::TokenId image = 0;  // engine::Image::key
    int64_t begin = 0;          // its first patch
    int64_t patches = 0;
    int64_t tokens = 0;
    DeviceBuffer features;
  };
  // Patches [begin, begin + rows) of them.
  struct Chunk {
    size_t part = 0;  // unless it may have patches of several
    int64_t begin = 0;
    int64_t rows = 0;
  };
  // The images that are being computed, together. Several are done in one call.
  struct Work {
    uint64_t adapter = 0;  // CudaAdapterWeights::id; 0: base
    std::vector<Part> parts;
    int64_t patches = 0;
    int64_t chunk_rows = 0;  // of one product, at most
    // Of the stages: those of a part's pixels, of patches, and of a part's patches.
    std::vector<Chunk> pixels, rows, merged;
    // Of VisionPlan.
    std::vector<int32_t> tokens, frame_begins, window_begins;
    Stage stage = Stage::kEmbed;
    int64_t block = 0;
    size_t chunk = 0;
    size_t deepstack = 0;  // the next of VisionConfig::deepstack
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
                const Stream* stream, Linear linear, bool together)
      : vision_(*model->config().vision),
        tower_(model->tower()),
        ledger_(ledger),
        stream_(*stream),
        linear_(std::move(linear)),
        together_(together),
        rows_(slots, ledger, stream) {}

  absl::Status Start(absl::Span<const engine::Image* const> images);
  // Allocates for the work and writes the plan.
  absl::Status Prepare(absl::Span<const model::ImageGrid> grids, Work* work);
  // Runs the work's units until it ends, or a piece does. `images`: from its first one on. False:
  // there are more.
  absl::StatusOr<bool> Run(absl::Span<const engine::Image* const> images,
                           const CudaAdapterWeights* adapter, bool alone);
  absl::Status RunUnit();
  // Moves to the next unit; false: there is none.
  bool Next();
  // Of the current unit, against the limit of a piece.
  double Cost() const;
  double Operations() const;
  const std::vector<Chunk>& Chunks() const;  // of the current stage
  const Chunk& CurrentChunk() const { return Chunks()[work_->chunk]; }

  // Where the host has the current chunk's pixels: chunks take turns.
  uint16_t* Pixels() const {
    return host_.as<uint16_t>() + work_->chunk % 2 * kPixelRows * vision_.patch_elements();
  }
  void CopyPixels(const engine::Image& image, const Chunk& chunk);
  absl::Status Embed(const Chunk& chunk);
  absl::Status Project(const TowerWeights::Block& block, const Chunk& chunk);
  absl::Status Attention(const Chunk& chunk);
  absl::StatusOr<const __nv_bfloat16*> Activate(int64_t rows);
  absl::Status Attend(const TowerWeights::Block& block, const Chunk& chunk);
  absl::Status Merge(const TowerWeights::Merger& merger, bool deepstack, int64_t level,
                     const Chunk& chunk);
  // In its place, of TowerStyle::pools_patches.
  absl::Status Pool(const TowerWeights::Merger& merger, const Chunk& chunk);
  // Where the features of the chunk's image have a level, and its rows for the chunk there.
  float* Level(int64_t level, const Chunk& chunk) const;
  float* FeaturesAt(int64_t level, const Chunk& chunk) const;
  absl::Status Norm(const TowerNormWeights& weights, int64_t rows, int64_t size, double eps,
                    float* residual, const float* delta);

  const model::VisionConfig& vision_;
  const TowerWeights& tower_;
  MemoryLedger* const ledger_;
  const Stream& stream_;
  Linear linear_;
  const bool together_;  // whether an image's bits are the same in any company
  VisionRows rows_;      // of the current work and call
  std::optional<Work> work_;
  PinnedBuffer host_;    // the plan of the work, or two chunks of its pixels
  DeviceBuffer memory_;  // for the largest work so far
  Buffers buffers_;
};

}  // namespace dorad::cuda
