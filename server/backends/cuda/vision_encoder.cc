#include "server/backends/cuda/vision_encoder.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/backends/cuda/array_writer.h"
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
// If nothing else runs: requests that come meanwhile wait for as long as for a step of prompts.
constexpr double kAloneOperations = 2.4e13;
// Of the images that a call computes if nothing else runs.
constexpr int64_t kMostPatches = 16384;
// What a unit of few rows counts: its time is that of its launches.
constexpr double kLeastOperations = 1.2e10;

// Of attention and MLP of `rows` patches of an image in one block.
double AttendOperations(const model::VisionConfig& vision, int64_t rows, int64_t patches) {
  const auto width = static_cast<double>(vision.width);
  return static_cast<double>(rows) * width *
         (4.0 * static_cast<double>(patches) + 2.0 * width +
          4.0 * static_cast<double>(vision.inner));
}

// How many of the images, from the first on, have so many patches.
size_t CountFitting(absl::Span<const engine::Image* const> images, int64_t patches) {
  size_t count = 0;
  for (; count < images.size(); ++count) {
    patches -= images[count]->height * images[count]->width;
    if (patches < 0) break;
  }
  return count;
}

// The rows of one product: as many as a piece has room for. patches: of the largest image.
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
  // Pixels are embedded image by image in any case.
  const bool together = std::all_of(groups.begin() + 1, groups.end(), [](const LinearGroup* group) {
    return Linear::IsFused(*group);
  });
  return std::unique_ptr<VisionEncoder>(
      new VisionEncoder(model, slots, ledger, stream, std::move(linear), together));
}

absl::StatusOr<std::vector<VisionEncoder::Features>> VisionEncoder::Encode(
    absl::Span<const engine::Image* const> images, const CudaAdapterWeights* adapter, bool alone) {
  const uint64_t adapter_id = adapter == nullptr ? 0 : adapter->id();
  if (work_ && (work_->parts[0].image != images[0]->key || work_->adapter != adapter_id)) Stop();
  std::vector<Features> done;
  int64_t patches = 0;
  do {
    const auto rest = images.subspan(done.size());
    if (!work_) {
      const size_t fitting = CountFitting(rest, kMostPatches - patches);
      if (fitting == 0 && !done.empty()) break;
      const size_t count = alone && together_ ? std::max<size_t>(1, fitting) : 1;
      absl::Status started = Start(rest.first(count));
      // Memory for one may be there where that for several is not.
      if (!started.ok() && count > 1) started = Start(rest.first(1));
      if (!started.ok() && !done.empty()) break;
      DORAD_RETURN_IF_ERROR(started);
      work_->adapter = adapter_id;
    }
    patches += work_->patches;
    DORAD_ASSIGN_OR_RETURN(const bool ended, Run(rest, adapter, alone));
    if (!ended) break;
    for (Part& part : work_->parts) {
      done.push_back(std::make_shared<const CudaImageFeatures>(std::move(part.features),
                                                               part.tokens, vision_.output));
    }
    Stop();
  } while (alone && done.size() < images.size());
  return done;
}

absl::StatusOr<bool> VisionEncoder::Run(absl::Span<const engine::Image* const> images,
                                        const CudaAdapterWeights* adapter, bool alone) {
  VisionRows::Sizes sizes;
  for (const Chunk& chunk : work_->pixels) sizes.insert({chunk.rows, false});
  for (const Chunk& chunk : work_->rows) sizes.insert({chunk.rows, true});
  for (const Chunk& chunk : work_->merged) {
    // No adapter changes the projection of pooled patches.
    sizes.insert({chunk.rows / (vision_.merge * vision_.merge), !vision_.style.pools_patches});
  }
  DORAD_RETURN_IF_ERROR(rows_.Upload(sizes, adapter));
  const bool several = work_->parts.size() > 1;
  const double most = alone ? kAloneOperations : kPieceOperations;
  double operations = 0.0;
  bool more = true;
  bool has_pixels = false;
  do {
    operations += Cost();
    if (work_->stage == Stage::kEmbed) {
      const Chunk& chunk = CurrentChunk();
      CopyPixels(*images[chunk.part], chunk);
      // The chunk before is computed meanwhile; its place takes the next one.
      if (has_pixels) DORAD_RETURN_IF_ERROR(stream_.Synchronize(kImage));
      has_pixels = true;
    }
    DORAD_RETURN_IF_ERROR(RunUnit());
    more = Next();
  } while (more && (several || ((alone || !has_pixels) && operations + Cost() <= most)));
  // The adapter may be released, and the host's buffers written, after this call.
  DORAD_RETURN_IF_ERROR(stream_.Synchronize(kImage));
  return !more;
}

absl::Status VisionEncoder::Start(absl::Span<const engine::Image* const> images) {
  Work work;
  std::vector<model::ImageGrid> grids;
  int64_t largest = 0;
  const auto levels = 1 + static_cast<int64_t>(vision_.deepstack.size());
  for (const engine::Image* image : images) {
    const model::ImageGrid& grid =
        grids.emplace_back(model::ImageGrid{/*frames=*/1, image->height, image->width});
    Part& part = work.parts.emplace_back();
    part.image = image->key;
    part.begin = work.patches;
    part.patches = vision_.patches(grid);
    part.tokens = vision_.tokens(grid);
    DORAD_ASSIGN_OR_RETURN(
        part.features,
        DeviceBuffer::Allocate(ledger_, "images", levels * part.tokens * vision_.output * 4));
    work.patches += part.patches;
    largest = std::max(largest, part.patches);
  }
  work.chunk_rows = ChunkRows(vision_, largest);
  const auto divide = [](size_t part, int64_t begin, int64_t patches, int64_t rows,
                         std::vector<Chunk>* to) {
    const int64_t end = begin + patches;
    for (; begin < end; begin += rows) to->push_back({part, begin, std::min(rows, end - begin)});
  };
  for (size_t i = 0; i < work.parts.size(); ++i) {
    const Part& part = work.parts[i];
    divide(i, part.begin, part.patches, kPixelRows, &work.pixels);
    divide(i, part.begin, part.patches, work.chunk_rows, &work.merged);
  }
  divide(0, 0, work.patches, work.chunk_rows, &work.rows);
  DORAD_RETURN_IF_ERROR(Prepare(grids, &work));
  work_.emplace(std::move(work));
  return absl::OkStatus();
}

absl::Status VisionEncoder::Prepare(absl::Span<const model::ImageGrid> grids, Work* work) {
  const int64_t patches = work->patches;
  const int64_t width = vision_.width;
  const int64_t chunk = std::min(patches, work->chunk_rows);
  const int64_t tokens = chunk / (vision_.merge * vision_.merge);
  const int64_t inner = vision_.inner * (vision_.style.gated() ? 2 : 1);
  VisionPlan plan = PlanImages(vision_, grids, work->chunk_rows);
  const auto lay_out = [&](std::byte* memory) {
    Layout layout;
    const auto place = [&](int64_t size, auto** to) {
      const int64_t at = layout.Add(size * static_cast<int64_t>(sizeof(**to)));
      if (memory == nullptr) return;
      *to = reinterpret_cast<std::remove_reference_t<decltype(*to)>>(memory + at);
    };
    place(std::min(patches, kPixelRows) * vision_.patch_elements(), &buffers_.pixels);
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
  // Pixels come through the same memory, one chunk beside another.
  const int64_t pixel_bytes =
      2 * kPixelRows * vision_.patch_elements() * int64_t{sizeof(__nv_bfloat16)};
  DORAD_RETURN_IF_ERROR(Grow(&host_, std::max(plan_bytes, pixel_bytes)));
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
  return stream_.Synchronize(kImage);
}

const std::vector<VisionEncoder::Chunk>& VisionEncoder::Chunks() const {
  switch (work_->stage) {
    case Stage::kEmbed:
      return work_->pixels;
    case Stage::kProject:
    case Stage::kAttend:
      return work_->rows;
    case Stage::kMergeDeepstack:
    case Stage::kMerge:
      return work_->merged;
  }
  DORAD_CHECK(false);
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
      return AttendOperations(vision_, CurrentChunk().rows, work_->parts[0].patches);
    case Stage::kMergeDeepstack:
    case Stage::kMerge:
      if (vision_.style.pools_patches) return 2.0 * rows / patches_of_token * width * output;
      return 2.0 * rows * width * (static_cast<double>(vision_.merged_width()) + output);
  }
  return 0.0;
}

bool VisionEncoder::Next() {
  Work& work = *work_;
  if (++work.chunk < Chunks().size()) return true;
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

absl::Status VisionEncoder::RunUnit() {
  const Chunk& chunk = CurrentChunk();
  switch (work_->stage) {
    case Stage::kEmbed:
      return Embed(chunk);
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

}  // namespace dorad::cuda
