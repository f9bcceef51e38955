// What the stages of a tower launch.
#include <algorithm>
#include <cmath>

#include "kernels/decoder/activation.h"
#include "kernels/decoder/rms_norm.h"
#include "kernels/dora/import.h"
#include "kernels/vision/layer_norm.h"
#include "server/backends/cuda/vision_encoder.h"
#include "server/platform/error.h"
#include "server/platform/files/elements.h"

namespace dorad::cuda {
namespace {

constexpr char kImage[] = "computing an image";

}  // namespace

// Copies tokens in the order of rows.
void VisionEncoder::CopyPixels(const engine::Image& image, const Chunk& chunk) {
  const int64_t patches_of_token = vision_.merge * vision_.merge;
  const int64_t elements = patches_of_token * vision_.patch_elements();
  const auto bytes = elements * static_cast<int64_t>(SizeOf(image.pixel_dtype()));
  const auto* const from = reinterpret_cast<const std::byte*>(image.pixels.data());
  uint16_t* to = Pixels();
  const int64_t first = chunk.begin / patches_of_token;
  const int64_t end = first + chunk.rows / patches_of_token;
  for (int64_t i = first; i < end; ++i, to += elements) {
    ToBf16(image.pixel_dtype(), {from + work_->tokens[i] * bytes, static_cast<size_t>(bytes)}, to);
  }
}

absl::Status VisionEncoder::Embed(const Chunk& chunk) {
  const int64_t bytes = chunk.rows * vision_.patch_elements() * int64_t{sizeof(__nv_bfloat16)};
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(buffers_.pixels, Pixels(), bytes, cudaMemcpyHostToDevice, stream_.get()),
      kImage);
  const int64_t width = vision_.width;
  float* const residual = buffers_.residual + chunk.begin * width;
  DORAD_RETURN_IF_ERROR(linear_.Run(tower_.patch, rows_.Find(chunk.rows, /*of_module=*/false),
                                    buffers_.pixels, residual));
  if (vision_.style.position_table) {
    DORAD_RETURN_IF_CUDA_ERROR(kernels::AddTableRows(residual, buffers_.taps + chunk.begin,
                                                     tower_.table, static_cast<int32_t>(chunk.rows),
                                                     static_cast<int32_t>(width), stream_.get()),
                               kImage);
  }
  if (!vision_.style.patch_norm) return absl::OkStatus();
  DORAD_RETURN_IF_ERROR(
      Norm(tower_.patch_norm, chunk.rows, width, vision_.norm_eps, residual, /*delta=*/nullptr));
  return ToStatus(kernels::ImportVector(buffers_.normed, kernels::FloatType::kBF16,
                                        chunk.rows * width, residual, stream_.get()),
                  kImage);
}

absl::Status VisionEncoder::Norm(const TowerNormWeights& weights, int64_t rows, int64_t size,
                                 double eps, float* residual, const float* delta) {
  if (weights.bias == nullptr) {
    kernels::AddRmsNormParams params;
    params.rows = static_cast<int32_t>(rows);
    params.size = static_cast<int32_t>(size);
    params.residual = residual;
    params.delta = delta;
    params.weight = weights.weight;
    params.eps = static_cast<float>(eps);
    params.out = buffers_.normed;
    return ToStatus(kernels::AddRmsNorm(params, stream_.get()), kImage);
  }
  kernels::AddLayerNormParams params;
  params.rows = static_cast<int32_t>(rows);
  params.size = static_cast<int32_t>(size);
  params.residual = residual;
  params.delta = delta;
  params.weight = weights.weight;
  params.bias = weights.bias;
  params.eps = static_cast<float>(eps);
  params.out = buffers_.normed;
  return ToStatus(kernels::AddLayerNorm(params, stream_.get()), kImage);
}

absl::Status VisionEncoder::Project(const TowerWeights::Block& block, const Chunk& chunk) {
  const int64_t width = vision_.width;
  DORAD_RETURN_IF_ERROR(Norm(block.norm1, chunk.rows, width, vision_.norm_eps,
                             buffers_.residual + chunk.begin * width, /*delta=*/nullptr));
  __nv_bfloat16* const qkv = buffers_.qkv + chunk.begin * 3 * width;
  DORAD_RETURN_IF_ERROR(
      linear_.Run(block.qkv, rows_.Find(chunk.rows, /*of_module=*/true), buffers_.normed, qkv));
  if (!vision_.style.rotary) return absl::OkStatus();
  kernels::PatchRotaryParams rotary;
  rotary.qkv = qkv;
  rotary.taps = buffers_.taps + chunk.begin;
  rotary.rows = static_cast<int32_t>(chunk.rows);
  rotary.heads = static_cast<int32_t>(vision_.heads);
  rotary.head_dim = static_cast<int32_t>(vision_.head_dim());
  rotary.cos = buffers_.cos;
  rotary.sin = buffers_.sin;
  return ToStatus(kernels::RotatePatches(rotary, stream_.get()), kImage);
}

absl::Status VisionEncoder::Attention(const Chunk& chunk) {
  const bool windowed = vision_.blocks[work_->block].windowed;
  const std::vector<int32_t>& begins = windowed ? work_->window_begins : work_->frame_begins;
  const int32_t first = begins[work_->chunk];
  kernels::SegmentAttentionParams params;
  params.isa = linear_.isa();
  params.qkv = buffers_.qkv;
  params.rows = static_cast<int32_t>(work_->patches);
  params.heads = static_cast<int32_t>(vision_.heads);
  params.head_dim = static_cast<int32_t>(vision_.head_dim());
  params.tiles = (windowed ? buffers_.window_tiles : buffers_.frame_tiles) + first;
  params.num_tiles = begins[work_->chunk + 1] - first;
  params.first_row = static_cast<int32_t>(chunk.begin);
  params.softmax_scale = 1.0f / std::sqrt(static_cast<float>(vision_.head_dim()));
  params.out = buffers_.normed;
  return ToStatus(kernels::SegmentAttention(params, stream_.get()), kImage);
}

// Of buffers_.wide; returns the activated rows.
absl::StatusOr<const __nv_bfloat16*> VisionEncoder::Activate(int64_t rows) {
  const auto count = static_cast<int32_t>(rows);
  const auto inner = static_cast<int32_t>(vision_.inner);
  cudaError_t error = cudaSuccess;
  switch (vision_.style.mlp) {
    case model::TowerStyle::kGeluTanh:
      error = kernels::GeluTanh(buffers_.wide, rows * inner, stream_.get());
      break;
    case model::TowerStyle::kSiluGate:
      error = kernels::SiluMul(buffers_.wide, count, inner, buffers_.gated, stream_.get());
      break;
    case model::TowerStyle::kGeluGate:
      error = kernels::GeluMul(buffers_.wide, count, inner, buffers_.gated, stream_.get());
      break;
  }
  DORAD_RETURN_IF_CUDA_ERROR(error, kImage);
  return vision_.style.gated() ? buffers_.gated : buffers_.wide;
}

absl::Status VisionEncoder::Attend(const TowerWeights::Block& block, const Chunk& chunk) {
  const int64_t width = vision_.width;
  const LinearRows& rows = rows_.Find(chunk.rows, /*of_module=*/true);
  float* const residual = buffers_.residual + chunk.begin * width;
  DORAD_RETURN_IF_ERROR(Attention(chunk));
  DORAD_RETURN_IF_ERROR(linear_.Run(block.proj, rows, buffers_.normed, buffers_.delta));
  DORAD_RETURN_IF_ERROR(
      Norm(block.norm2, chunk.rows, width, vision_.norm_eps, residual, buffers_.delta));
  DORAD_RETURN_IF_ERROR(linear_.Run(block.fc1, rows, buffers_.normed, buffers_.wide));
  DORAD_ASSIGN_OR_RETURN(const __nv_bfloat16* const inner, Activate(chunk.rows));
  DORAD_RETURN_IF_ERROR(linear_.Run(block.fc2, rows, inner, buffers_.delta));
  return ToStatus(kernels::AddInPlace(residual, buffers_.delta, chunk.rows * width, stream_.get()),
                  kImage);
}

absl::Status VisionEncoder::Merge(const TowerWeights::Merger& merger, bool deepstack, int64_t level,
                                  const Chunk& chunk) {
  const int64_t patches_of_token = vision_.merge * vision_.merge;
  const int64_t tokens = chunk.rows / patches_of_token;
  const LinearRows& rows = rows_.Find(tokens, /*of_module=*/true);
  float* const residual = buffers_.residual + chunk.begin * vision_.width;
  // The norm of a deepstack merger is that of whole tokens.
  DORAD_RETURN_IF_ERROR(Norm(merger.norm, deepstack ? tokens : chunk.rows,
                             deepstack ? vision_.merged_width() : vision_.width, vision_.merger_eps,
                             residual, /*delta=*/nullptr));
  if (vision_.style.joins_patches) {
    DORAD_RETURN_IF_CUDA_ERROR(
        kernels::ByChannel(buffers_.normed, tokens, static_cast<int32_t>(patches_of_token),
                           static_cast<int32_t>(vision_.width), buffers_.wide, stream_.get()),
        kImage);
    DORAD_RETURN_IF_ERROR(linear_.Run(merger.join, rows, buffers_.wide, buffers_.normed));
  }
  DORAD_RETURN_IF_ERROR(linear_.Run(merger.fc1, rows, buffers_.normed, buffers_.wide));
  DORAD_RETURN_IF_CUDA_ERROR(
      kernels::Gelu(buffers_.wide, tokens * vision_.merger_inner(), stream_.get()), kImage);
  if (!vision_.style.windows) {
    return linear_.Run(merger.fc2, rows, buffers_.wide, FeaturesAt(level, chunk));
  }
  DORAD_RETURN_IF_ERROR(linear_.Run(merger.fc2, rows, buffers_.wide, buffers_.delta));
  return ToStatus(
      kernels::ScatterRows(buffers_.delta, buffers_.tokens + chunk.begin / patches_of_token,
                           static_cast<int32_t>(tokens), static_cast<int32_t>(vision_.output),
                           Level(level, chunk), stream_.get()),
      kImage);
}

absl::Status VisionEncoder::Pool(const TowerWeights::Merger& merger, const Chunk& chunk) {
  const int64_t width = vision_.width;
  const int64_t patches_of_token = vision_.merge * vision_.merge;
  const int64_t tokens = chunk.rows / patches_of_token;
  DORAD_RETURN_IF_ERROR(Norm(merger.norm, chunk.rows, width, vision_.norm_eps,
                             buffers_.residual + chunk.begin * width, /*delta=*/nullptr));
  DORAD_RETURN_IF_CUDA_ERROR(
      kernels::PoolPatches(buffers_.normed, tokens, static_cast<int32_t>(patches_of_token),
                           static_cast<int32_t>(width), buffers_.delta, stream_.get()),
      kImage);
  DORAD_RETURN_IF_ERROR(Norm({merger.pooled_norm, nullptr}, tokens, width, vision_.merger_eps,
                             buffers_.delta, /*delta=*/nullptr));
  return linear_.Run(merger.projection, rows_.Find(tokens, /*of_module=*/false), buffers_.normed,
                     FeaturesAt(/*level=*/0, chunk));
}

float* VisionEncoder::Level(int64_t level, const Chunk& chunk) const {
  const Part& part = work_->parts[chunk.part];
  return part.features.as<float>() + level * part.tokens * vision_.output;
}

float* VisionEncoder::FeaturesAt(int64_t level, const Chunk& chunk) const {
  const int64_t patch = chunk.begin - work_->parts[chunk.part].begin;
  return Level(level, chunk) + patch / (vision_.merge * vision_.merge) * vision_.output;
}

}  // namespace dorad::cuda
