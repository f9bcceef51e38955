#include "server/backends/cuda/vision_encoder.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/decoder/activation.h"
#include "kernels/decoder/rms_norm.h"
#include "kernels/dora/import.h"
#include "kernels/vision/layer_norm.h"
#include "server/backends/cuda/array_writer.h"
#include "server/backends/cuda/elements.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

constexpr char kImage[] = "computing an image";

// Patches of one product, at most and at least.
constexpr int64_t kMostRows = 4096;
constexpr int64_t kLeastRows = 512;
// Operations of one piece: less than a millisecond of an H100.
constexpr double kPieceOperations = 2.2e11;
// What a unit of few rows counts: its time is that of its launches.
constexpr double kLeastOperations = 1.2e10;

// Of attention and MLP of `rows` patches of an image in one block.
double AttendOperations(const model::VisionConfig& vision, int64_t rows, int64_t patches) {
  const auto width = static_cast<double>(vision.width);
  return static_cast<double>(rows) * width *
         (4.0 * static_cast<double>(patches) + 2.0 * width +
          4.0 * static_cast<double>(vision.inner));
}

// The rows of one product: as many as a piece has room for.
int64_t ChunkRows(const model::VisionConfig& vision, int64_t patches) {
  int64_t rows = kMostRows;
  while (rows > kLeastRows && AttendOperations(vision, rows, patches) > kPieceOperations) rows /= 2;
  return rows;
}

}  // namespace

absl::Status CheckTower(const model::VisionConfig& vision) {
  std::string problem;
  // Of a norm, at most.
  const int64_t widest = vision.style.pools_patches ? vision.width : vision.merged_width();
  if (!kernels::HasSegmentAttention(vision.head_dim())) {
    problem = absl::StrCat("heads of ", vision.head_dim(),
                           " elements: on a GPU the size is a multiple of 8 and at most 128");
  } else if (kLeastRows % (vision.merge * vision.merge) != 0) {
    problem = absl::StrCat("tokens of ", vision.merge, " x ", vision.merge, " patches");
  } else if (widest > 8192) {
    problem = absl::StrCat("norms of ", widest, " elements, more than 8192");
  } else {
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "MODEL_UNSUPPORTED",
                   absl::StrCat("the vision tower has ", problem));
}

absl::StatusOr<std::unique_ptr<VisionEncoder>> VisionEncoder::Create(const CudaModel* model,
                                                                     AdapterSlots* slots,
                                                                     MemoryLedger* ledger,
                                                                     const Stream* stream) {
  DORAD_CHECK(model->config().vision.has_value());
  DORAD_RETURN_IF_ERROR(CheckTower(*model->config().vision));
  const TowerWeights& tower = model->tower();
  const model::TowerStyle& style = model->config().vision->style;
  std::vector<const LinearGroup*> groups = {&tower.patch};
  if (style.pools_patches) {
    groups.push_back(&tower.merger.projection);
  } else {
    groups.insert(groups.end(), {&tower.merger.fc1, &tower.merger.fc2});
  }
  if (style.joins_patches) groups.push_back(&tower.merger.join);
  for (const TowerWeights::Block& block : tower.blocks) {
    groups.insert(groups.end(), {&block.qkv, &block.proj, &block.fc1, &block.fc2});
  }
  for (const TowerWeights::Merger& merger : tower.deepstack_mergers) {
    groups.insert(groups.end(), {&merger.fc1, &merger.fc2});
  }
  DORAD_ASSIGN_OR_RETURN(Linear linear,
                         Linear::Create(groups, kMostRows, model->isa(), ledger, stream));
  return std::unique_ptr<VisionEncoder>(
      new VisionEncoder(model, slots, ledger, stream, std::move(linear)));
}

absl::StatusOr<std::shared_ptr<const CudaImageFeatures>> VisionEncoder::Encode(
    const engine::Image& image, const CudaAdapterWeights* adapter) {
  const uint64_t adapter_id = adapter == nullptr ? 0 : adapter->id();
  if (!work_ || work_->image != image.key || work_->adapter != adapter_id) {
    work_.reset();
    DORAD_RETURN_IF_ERROR(Start(image));
    work_->adapter = adapter_id;
  }
  DORAD_RETURN_IF_ERROR(rows_.Upload(work_->patches, work_->chunk_rows, adapter));
  bool more = true;
  bool has_pixels = false;
  double operations = 0.0;
  do {
    operations += Cost();
    has_pixels = work_->stage == Stage::kEmbed;
    DORAD_RETURN_IF_ERROR(RunUnit(image));
    more = Next();
    // The host's copy of the pixels is used again.
  } while (more && !has_pixels && operations + Cost() <= kPieceOperations);
  // The adapter may be released, and the host's buffers written, after this call.
  DORAD_RETURN_IF_ERROR(stream_.Synchronize(kImage));
  if (more) return nullptr;
  const int64_t tokens = vision_.tokens(work_->grid);
  auto features =
      std::make_shared<const CudaImageFeatures>(std::move(work_->features), tokens, vision_.output);
  work_.reset();
  return features;
}

absl::Status VisionEncoder::Start(const engine::Image& image) {
  Work work;
  work.image = image.key;
  work.grid = {/*frames=*/1, image.height, image.width};
  work.patches = vision_.patches(work.grid);
  work.chunk_rows = ChunkRows(vision_, work.patches);
  const auto levels = 1 + static_cast<int64_t>(vision_.deepstack.size());
  DORAD_ASSIGN_OR_RETURN(work.features, DeviceBuffer::Allocate(ledger_, "images",
                                                               levels * vision_.tokens(work.grid) *
                                                                   vision_.output * 4));
  DORAD_RETURN_IF_ERROR(Prepare(&work));
  work_.emplace(std::move(work));
  return absl::OkStatus();
}

absl::Status VisionEncoder::Prepare(Work* work) {
  const int64_t patches = work->patches;
  const int64_t width = vision_.width;
  const int64_t chunk = std::min(patches, work->chunk_rows);
  const int64_t tokens = chunk / (vision_.merge * vision_.merge);
  const int64_t inner = vision_.inner * (vision_.style.gated() ? 2 : 1);
  VisionPlan plan = PlanImage(vision_, work->grid, work->chunk_rows);
  const auto lay_out = [&](std::byte* memory) {
    Layout layout;
    const auto place = [&](int64_t size, auto** to) {
      const int64_t at = layout.Add(size * static_cast<int64_t>(sizeof(**to)));
      if (memory == nullptr) return;
      *to = reinterpret_cast<std::remove_reference_t<decltype(*to)>>(memory + at);
    };
    place(std::min(patches, VisionRows::kPixelRows) * vision_.patch_elements(), &buffers_.pixels);
    place(patches * width, &buffers_.residual);
    place(patches * 3 * width, &buffers_.qkv);
    place(chunk * width, &buffers_.normed);
    place(std::max({chunk * inner, chunk * width, tokens * vision_.merger_inner()}),
          &buffers_.wide);
    place(vision_.style.gated() ? chunk * vision_.inner : 0, &buffers_.gated);
    place(std::max(chunk * width, tokens * vision_.output), &buffers_.delta);
    return layout.bytes();
  };
  const int64_t work_bytes = lay_out(nullptr);
  const auto write_plan = [&](std::byte* host, std::byte* device) {
    ArrayWriter writer(host, device);
    const auto write = [&](const auto& values, auto** on_device) {
      auto* const to = writer.Array(static_cast<int64_t>(values.size()), on_device);
      if (writer.writing()) std::copy(values.begin(), values.end(), to);
    };
    write(plan.taps, &buffers_.taps);
    write(plan.cos, &buffers_.cos);
    write(plan.sin, &buffers_.sin);
    write(plan.frame.tiles, &buffers_.frame_tiles);
    write(plan.windows.tiles, &buffers_.window_tiles);
    write(plan.tokens, &buffers_.tokens);
    return writer.bytes();
  };
  const int64_t plan_bytes = write_plan(nullptr, nullptr);
  DORAD_RETURN_IF_ERROR(Grow(&host_, plan_bytes));
  DORAD_RETURN_IF_ERROR(Grow(&memory_, ledger_, MemoryLedger::kWorkspace, work_bytes + plan_bytes));
  (void)lay_out(memory_.as<std::byte>());
  std::byte* const on_device = memory_.as<std::byte>(work_bytes);
  (void)write_plan(host_.as(), on_device);
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(on_device, host_.as(), plan_bytes, cudaMemcpyHostToDevice, stream_.get()),
      kImage);
  work->tokens = std::move(plan.tokens);
  work->frame_begins = std::move(plan.frame.begins);
  work->window_begins = std::move(plan.windows.begins);
  // Pixels come through the same memory.
  return stream_.Synchronize(kImage);
}

VisionEncoder::Chunk VisionEncoder::CurrentChunk() const {
  const int64_t rows = RowsOfChunk();
  const int64_t begin = work_->chunk * rows;
  return {begin, std::min(rows, work_->patches - begin)};
}

int64_t VisionEncoder::RowsOfChunk() const {
  return work_->stage == Stage::kEmbed ? VisionRows::kPixelRows : work_->chunk_rows;
}

double VisionEncoder::Cost() const { return std::max(Operations(), kLeastOperations); }

double VisionEncoder::Operations() const {
  const auto rows = static_cast<double>(CurrentChunk().rows);
  const auto width = static_cast<double>(vision_.width);
  const auto output = static_cast<double>(vision_.output);
  const auto patches_of_token = static_cast<double>(vision_.merge * vision_.merge);
  switch (work_->stage) {
    case Stage::kEmbed:
      return 2.0 * rows * width * static_cast<double>(vision_.patch_elements());
    case Stage::kProject:
      return 6.0 * rows * width * width;
    case Stage::kAttend:
      return AttendOperations(vision_, CurrentChunk().rows, work_->patches);
    case Stage::kMergeDeepstack:
    case Stage::kMerge:
      if (vision_.style.pools_patches) return 2.0 * rows / patches_of_token * width * output;
      return 2.0 * rows * width * (static_cast<double>(vision_.merged_width()) + output);
  }
  return 0.0;
}

bool VisionEncoder::Next() {
  Work& work = *work_;
  if (++work.chunk * RowsOfChunk() < work.patches) return true;
  work.chunk = 0;
  const auto next_block = [&] {
    ++work.block;
    work.stage =
        work.block < static_cast<int64_t>(vision_.blocks.size()) ? Stage::kProject : Stage::kMerge;
  };
  switch (work.stage) {
    case Stage::kEmbed:
      work.stage = Stage::kProject;
      return true;
    case Stage::kProject:
      work.stage = Stage::kAttend;
      return true;
    case Stage::kAttend:
      if (work.deepstack < vision_.deepstack.size() &&
          vision_.deepstack[work.deepstack] == work.block) {
        work.stage = Stage::kMergeDeepstack;
      } else {
        next_block();
      }
      return true;
    case Stage::kMergeDeepstack:
      ++work.deepstack;
      next_block();
      return true;
    case Stage::kMerge:
      return false;
  }
  return false;
}

absl::Status VisionEncoder::RunUnit(const engine::Image& image) {
  const Chunk chunk = CurrentChunk();
  switch (work_->stage) {
    case Stage::kEmbed:
      return Embed(image, chunk);
    case Stage::kProject:
      return Project(tower_.blocks[work_->block], chunk);
    case Stage::kAttend:
      return Attend(tower_.blocks[work_->block], chunk);
    case Stage::kMergeDeepstack:
      return Merge(tower_.deepstack_mergers[work_->deepstack], /*deepstack=*/true,
                   static_cast<int64_t>(work_->deepstack) + 1, chunk);
    case Stage::kMerge:
      if (vision_.style.pools_patches) return Pool(tower_.merger, chunk);
      return Merge(tower_.merger, /*deepstack=*/false, /*level=*/0, chunk);
  }
  return absl::OkStatus();
}

// Copies tokens in the order of rows.
void VisionEncoder::CopyPixels(const engine::Image& image, const Chunk& chunk) {
  const int64_t patches_of_token = vision_.merge * vision_.merge;
  const int64_t elements = patches_of_token * vision_.patch_elements();
  const auto bytes = elements * static_cast<int64_t>(SizeOf(image.dtype));
  const auto* const from = reinterpret_cast<const std::byte*>(image.pixels.data());
  auto* to = host_.as<__nv_bfloat16>();
  const int64_t first = chunk.begin / patches_of_token;
  const int64_t end = first + chunk.rows / patches_of_token;
  for (int64_t i = first; i < end; ++i, to += elements) {
    ToBf16(image.dtype, {from + work_->tokens[i] * bytes, static_cast<size_t>(bytes)}, to);
  }
}

absl::Status VisionEncoder::Embed(const engine::Image& image, const Chunk& chunk) {
  const int64_t bytes = chunk.rows * vision_.patch_elements() * int64_t{sizeof(__nv_bfloat16)};
  DORAD_RETURN_IF_ERROR(Grow(&host_, bytes));
  CopyPixels(image, chunk);
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(buffers_.pixels, host_.as(), bytes, cudaMemcpyHostToDevice, stream_.get()),
      kImage);
  const int64_t width = vision_.width;
  float* const residual = buffers_.residual + chunk.begin * width;
  DORAD_RETURN_IF_ERROR(linear_.Run(tower_.patch, rows_.Find(chunk.rows, /*adapted=*/false),
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
      linear_.Run(block.qkv, rows_.Find(chunk.rows, /*adapted=*/true), buffers_.normed, qkv));
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
  const LinearRows& rows = rows_.Find(chunk.rows, /*adapted=*/true);
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
  const LinearRows& rows = rows_.Find(tokens, /*adapted=*/true);
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
  const int64_t first = chunk.begin / patches_of_token;
  float* const to = Features(level);
  if (!vision_.style.windows) {
    return linear_.Run(merger.fc2, rows, buffers_.wide, to + first * vision_.output);
  }
  DORAD_RETURN_IF_ERROR(linear_.Run(merger.fc2, rows, buffers_.wide, buffers_.delta));
  return ToStatus(
      kernels::ScatterRows(buffers_.delta, buffers_.tokens + first, static_cast<int32_t>(tokens),
                           static_cast<int32_t>(vision_.output), to, stream_.get()),
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
  return linear_.Run(merger.projection, rows_.Find(tokens, /*adapted=*/false), buffers_.normed,
                     Features(0) + chunk.begin / patches_of_token * vision_.output);
}

float* VisionEncoder::Features(int64_t level) const {
  return work_->features.as<float>() + level * vision_.tokens(work_->grid) * vision_.output;
}

}  // namespace dorad::cuda
