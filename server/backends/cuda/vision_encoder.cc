#include "server/backends/cuda/vision_encoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/vision/layer_norm.h"
#include "server/backends/cuda/elements.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

constexpr char kImage[] = "computing an image";

// Patches of one product, at most and at least.
constexpr int64_t kMostRows = 4096;
constexpr int64_t kLeastRows = 512;
// Patches whose pixels are copied at once.
constexpr int64_t kPixelRows = 1024;
// Operations of one piece: less than a millisecond of an H100.
constexpr double kPieceOperations = 2e11;

// Packs arrays at the same places of host and device memory.
class PlanLayout {
 public:
  PlanLayout(std::byte* host, std::byte* device) : host_(host), device_(device) {}

  // The array on the host, and where the device has it.
  template <typename T>
  T* Array(int64_t size, T** on_device) {
    const int64_t offset = layout_.Add(size * static_cast<int64_t>(sizeof(T)));
    *on_device = reinterpret_cast<T*>(device_ + offset);
    return reinterpret_cast<T*>(host_ + offset);
  }
  int64_t bytes() const { return layout_.bytes(); }

 private:
  std::byte* const host_;
  std::byte* const device_;
  Layout layout_;
};

absl::Status Grow(PinnedBuffer* buffer, int64_t bytes) {
  if (buffer->bytes() >= bytes) return absl::OkStatus();
  DORAD_ASSIGN_OR_RETURN(*buffer, PinnedBuffer::Allocate(bytes));
  return absl::OkStatus();
}

absl::Status Grow(DeviceBuffer* buffer, MemoryLedger* ledger, int64_t bytes) {
  if (buffer->bytes() >= bytes) return absl::OkStatus();
  *buffer = DeviceBuffer();  // first: the ledger need not have room for both
  DORAD_ASSIGN_OR_RETURN(*buffer, DeviceBuffer::Allocate(ledger, MemoryLedger::kWorkspace, bytes));
  return absl::OkStatus();
}

// Rows of one image, whose attention has one segment.
std::vector<kernels::SegmentTile> TilesOf(int64_t patches) {
  std::vector<kernels::SegmentTile> tiles;
  for (int64_t row = 0; row < patches; row += kernels::kSegmentTileRows) {
    const int64_t rows = std::min<int64_t>(kernels::kSegmentTileRows, patches - row);
    tiles.push_back(
        {static_cast<int32_t>(row), static_cast<int32_t>(rows), 0, static_cast<int32_t>(patches)});
  }
  return tiles;
}

static_assert(kLeastRows % kernels::kSegmentTileRows == 0);

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
  if (!(vision.style == model::TowerStyle{}) || !vision.merger_bias || vision.row_breaks) {
    problem = "another form than that of Qwen3-VL's";
  } else if (!kernels::HasSegmentAttention(vision.head_dim())) {
    problem = absl::StrCat("heads of ", vision.head_dim(),
                           " elements: on a GPU the size is a multiple of 8 and at most 128");
  } else if (vision.patch_elements() % 8 != 0 || vision.inner % 8 != 0 || vision.output % 8 != 0) {
    problem = "widths that are not multiples of 8";
  } else if (kLeastRows % (vision.merge * vision.merge) != 0) {
    problem = absl::StrCat("tokens of ", vision.merge, " x ", vision.merge, " patches");
  } else if (vision.merged_width() > 8192) {
    problem = absl::StrCat("merged tokens of ", vision.merged_width(), " elements, more than 8192");
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
  std::vector<const LinearGroup*> groups = {&tower.patch, &tower.merger.fc1, &tower.merger.fc2};
  for (const TowerWeights::Block& block : tower.blocks) {
    groups.insert(groups.end(), {&block.qkv, &block.proj, &block.fc1, &block.fc2});
  }
  for (const TowerWeights::Merger& merger : tower.deepstack_mergers) {
    groups.insert(groups.end(), {&merger.fc1, &merger.fc2});
  }
  DORAD_ASSIGN_OR_RETURN(Linear linear, Linear::Create(groups, kMostRows, ledger, stream));
  return std::unique_ptr<VisionEncoder>(
      new VisionEncoder(model, slots, ledger, stream, std::move(linear)));
}

absl::StatusOr<std::shared_ptr<const CudaImageFeatures>> VisionEncoder::Encode(
    const engine::Image& image, const CudaAdapterWeights* adapter) {
  adapter_ = adapter;
  const uint64_t adapter_id = adapter == nullptr ? 0 : adapter->id();
  if (!work_ || work_->image != image.key || work_->adapter != adapter_id) {
    work_.reset();
    DORAD_RETURN_IF_ERROR(Start(image));
    work_->adapter = adapter_id;
  }
  DORAD_RETURN_IF_ERROR(UploadRows());
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
  DORAD_RETURN_IF_ERROR(Prepare(work));
  work_.emplace(std::move(work));
  return absl::OkStatus();
}

absl::Status VisionEncoder::Prepare(const Work& work) {
  const int64_t patches = work.patches;
  const int64_t chunk = std::min(patches, work.chunk_rows);
  const int64_t places = std::max(work.grid.height, work.grid.width);
  const int64_t half = vision_.head_dim() / 2;
  const std::vector<kernels::SegmentTile> tiles = TilesOf(patches);
  const auto lay_out = [&](std::byte* device) {
    PlanLayout layout(nullptr, device);
    (void)layout.Array(std::min(patches, kPixelRows) * vision_.patch_elements(), &buffers_.pixels);
    (void)layout.Array(patches * vision_.width, &buffers_.residual);
    (void)layout.Array(patches * 3 * vision_.width, &buffers_.qkv);
    (void)layout.Array(chunk * vision_.width, &buffers_.normed);
    (void)layout.Array(chunk * std::max(vision_.inner, vision_.width), &buffers_.wide);
    (void)layout.Array(chunk * vision_.width, &buffers_.delta);
    return layout.bytes();
  };
  const int64_t work_bytes = lay_out(nullptr);
  const auto write_plan = [&](std::byte* host, std::byte* device) {
    PlanLayout layout(host, device);
    kernels::PatchTaps* const taps = layout.Array(patches, &buffers_.taps);
    float* const cos = layout.Array(places * half, &buffers_.cos);
    float* const sin = layout.Array(places * half, &buffers_.sin);
    kernels::SegmentTile* const to =
        layout.Array(static_cast<int64_t>(tiles.size()), &buffers_.tiles);
    if (host == nullptr) return layout.bytes();
    const std::vector<model::PatchPlace> order = PatchPlaces(vision_, work.grid);
    for (int64_t i = 0; i < patches; ++i) {
      const model::TableTaps table = TapsOf(vision_, work.grid, order[i]);
      std::copy(std::begin(table.rows), std::end(table.rows), taps[i].rows);
      std::copy(std::begin(table.weights), std::end(table.weights), taps[i].weights);
      taps[i].row = static_cast<int32_t>(order[i].row);
      taps[i].column = static_cast<int32_t>(order[i].column);
    }
    for (int64_t p = 0; p < places; ++p) {
      FillPatchAngles(vision_, {p, p}, cos + p * half, sin + p * half);
    }
    std::copy(tiles.begin(), tiles.end(), to);
    return layout.bytes();
  };
  const int64_t plan_bytes = write_plan(nullptr, nullptr);
  DORAD_RETURN_IF_ERROR(Grow(&host_, plan_bytes));
  DORAD_RETURN_IF_ERROR(Grow(&memory_, ledger_, work_bytes + plan_bytes));
  (void)lay_out(memory_.as<std::byte>());
  std::byte* const plan = memory_.as<std::byte>(work_bytes);
  (void)write_plan(host_.as(), plan);
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(plan, host_.as(), plan_bytes, cudaMemcpyHostToDevice, stream_.get()), kImage);
  // Pixels come through the same memory.
  return stream_.Synchronize(kImage);
}

absl::Status VisionEncoder::UploadRows() {
  int slot = -1;
  slots_.BeginStep();
  if (adapter_ != nullptr) {
    DORAD_ASSIGN_OR_RETURN(slot, slots_.Assign(*adapter_, stream_));
  }
  rows_.clear();
  const auto add = [&](int64_t rows, bool adapted) {
    LinearRows to;
    to.rows = rows;
    to.adapted = adapted;
    to.ranges = {adapted ? AdapterRange{adapter_, slot, 0, rows}
                         : AdapterRange{nullptr, -1, 0, rows}};
    to.table = slots_.table();
    to.maps = slots_.maps();
    rows_.push_back(std::move(to));
  };
  const bool adapted = adapter_ != nullptr;
  const auto add_parts = [&](int64_t most, bool with_adapter, int64_t divisor) {
    for (const int64_t rows : {std::min(work_->patches, most), work_->patches % most}) {
      if (rows > 0) add(rows / divisor, with_adapter);
    }
  };
  add_parts(kPixelRows, /*with_adapter=*/false, 1);
  add_parts(work_->chunk_rows, adapted, 1);
  add_parts(work_->chunk_rows, adapted, vision_.merge * vision_.merge);
  const auto write = [&](std::byte* host, std::byte* device) {
    PlanLayout layout(host, device);
    for (LinearRows& rows : rows_) {
      const int64_t blocks =
          (rows.rows + kernels::kSegmentBlockRows - 1) / kernels::kSegmentBlockRows;
      kernels::RowSegment *on_device = nullptr, *range_on_device = nullptr;
      int32_t* counts_on_device = nullptr;
      kernels::RowSegment* const segments =
          layout.Array(blocks * kernels::kSegmentBlockRows, &on_device);
      int32_t* const counts = layout.Array(blocks, &counts_on_device);
      kernels::RowSegment* const range = layout.Array(1, &range_on_device);
      if (host == nullptr) continue;
      const int32_t row_slot = rows.ranges[0].slot;
      *range = {row_slot, 0, static_cast<int32_t>(rows.rows)};
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t end = std::min<int64_t>(kernels::kSegmentBlockRows,
                                              rows.rows - b * kernels::kSegmentBlockRows);
        segments[b * kernels::kSegmentBlockRows] = {row_slot, 0, static_cast<int32_t>(end)};
        counts[b] = 1;
      }
      rows.segments = {on_device, counts_on_device};
      rows.range_segments = range_on_device;
    }
    return layout.bytes();
  };
  const int64_t bytes = write(nullptr, nullptr);
  DORAD_RETURN_IF_ERROR(Grow(&host_rows_, bytes));
  DORAD_RETURN_IF_ERROR(Grow(&device_rows_, ledger_, bytes));
  (void)write(host_rows_.as(), device_rows_.as<std::byte>());
  DORAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(device_rows_.as<>(), host_rows_.as(), bytes,
                                             cudaMemcpyHostToDevice, stream_.get()),
                             kImage);
  return absl::OkStatus();
}

const LinearRows& VisionEncoder::Rows(int64_t rows, bool adapted) const {
  adapted = adapted && adapter_ != nullptr;
  const auto found = std::find_if(rows_.begin(), rows_.end(), [&](const LinearRows& r) {
    return r.rows == rows && r.adapted == adapted;
  });
  DORAD_CHECK(found != rows_.end());
  return *found;
}

VisionEncoder::Chunk VisionEncoder::CurrentChunk() const {
  const int64_t rows = RowsOfChunk();
  const int64_t begin = work_->chunk * rows;
  return {begin, std::min(rows, work_->patches - begin)};
}

int64_t VisionEncoder::RowsOfChunk() const {
  return work_->stage == Stage::kEmbed ? kPixelRows : work_->chunk_rows;
}

double VisionEncoder::Cost() const {
  const auto rows = static_cast<double>(CurrentChunk().rows);
  const auto width = static_cast<double>(vision_.width);
  const auto merged = static_cast<double>(vision_.merged_width());
  switch (work_->stage) {
    case Stage::kEmbed:
      return 2.0 * rows * width * static_cast<double>(vision_.patch_elements());
    case Stage::kProject:
      return 6.0 * rows * width * width;
    case Stage::kAttend:
      return AttendOperations(vision_, CurrentChunk().rows, work_->patches);
    case Stage::kMergeDeepstack:
    case Stage::kMerge:
      return 2.0 * rows * width * (merged + static_cast<double>(vision_.output));
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
      return Merge(tower_.merger, /*deepstack=*/false, /*level=*/0, chunk);
  }
  return absl::OkStatus();
}

absl::Status VisionEncoder::Embed(const engine::Image& image, const Chunk& chunk) {
  const int64_t elements = vision_.patch_elements();
  const auto size = static_cast<int64_t>(SizeOf(image.dtype));
  const absl::Span<const std::byte> pixels(
      reinterpret_cast<const std::byte*>(image.pixels.data()) + chunk.begin * elements * size,
      static_cast<size_t>(chunk.rows * elements * size));
  const int64_t bytes = chunk.rows * elements * int64_t{sizeof(__nv_bfloat16)};
  DORAD_RETURN_IF_ERROR(Grow(&host_, bytes));
  ToBf16(image.dtype, pixels, host_.as<__nv_bfloat16>());
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(buffers_.pixels, host_.as(), bytes, cudaMemcpyHostToDevice, stream_.get()),
      kImage);
  float* const residual = buffers_.residual + chunk.begin * vision_.width;
  DORAD_RETURN_IF_ERROR(
      linear_.Run(tower_.patch, Rows(chunk.rows, /*adapted=*/false), buffers_.pixels, residual));
  return ToStatus(kernels::AddTableRows(residual, buffers_.taps + chunk.begin, tower_.table,
                                        static_cast<int32_t>(chunk.rows),
                                        static_cast<int32_t>(vision_.width), stream_.get()),
                  kImage);
}

absl::Status VisionEncoder::Norm(const LayerNormWeights& weights, int64_t rows, int64_t size,
                                 float* residual, const float* delta) {
  kernels::AddLayerNormParams params;
  params.rows = static_cast<int32_t>(rows);
  params.size = static_cast<int32_t>(size);
  params.residual = residual;
  params.delta = delta;
  params.weight = weights.weight;
  params.bias = weights.bias;
  params.eps = static_cast<float>(vision_.norm_eps);
  params.out = buffers_.normed;
  return ToStatus(kernels::AddLayerNorm(params, stream_.get()), kImage);
}

absl::Status VisionEncoder::Project(const TowerWeights::Block& block, const Chunk& chunk) {
  const int64_t width = vision_.width;
  DORAD_RETURN_IF_ERROR(Norm(block.norm1, chunk.rows, width,
                             buffers_.residual + chunk.begin * width, /*delta=*/nullptr));
  kernels::PatchRotaryParams rotary;
  rotary.qkv = buffers_.qkv + chunk.begin * 3 * width;
  rotary.taps = buffers_.taps + chunk.begin;
  rotary.rows = static_cast<int32_t>(chunk.rows);
  rotary.heads = static_cast<int32_t>(vision_.heads);
  rotary.head_dim = static_cast<int32_t>(vision_.head_dim());
  rotary.cos = buffers_.cos;
  rotary.sin = buffers_.sin;
  DORAD_RETURN_IF_ERROR(
      linear_.Run(block.qkv, Rows(chunk.rows, /*adapted=*/true), buffers_.normed, rotary.qkv));
  return ToStatus(kernels::RotatePatches(rotary, stream_.get()), kImage);
}

absl::Status VisionEncoder::Attend(const TowerWeights::Block& block, const Chunk& chunk) {
  const int64_t width = vision_.width;
  const LinearRows& rows = Rows(chunk.rows, /*adapted=*/true);
  float* const residual = buffers_.residual + chunk.begin * width;
  kernels::SegmentAttentionParams attention;
  attention.qkv = buffers_.qkv;
  attention.heads = static_cast<int32_t>(vision_.heads);
  attention.head_dim = static_cast<int32_t>(vision_.head_dim());
  attention.tiles = buffers_.tiles + chunk.begin / kernels::kSegmentTileRows;
  attention.num_tiles = static_cast<int32_t>((chunk.rows + kernels::kSegmentTileRows - 1) /
                                             kernels::kSegmentTileRows);
  attention.first_row = static_cast<int32_t>(chunk.begin);
  attention.softmax_scale = 1.0f / std::sqrt(static_cast<float>(vision_.head_dim()));
  attention.out = buffers_.normed;
  DORAD_RETURN_IF_CUDA_ERROR(kernels::SegmentAttention(attention, stream_.get()), kImage);
  DORAD_RETURN_IF_ERROR(linear_.Run(block.proj, rows, buffers_.normed, buffers_.delta));
  DORAD_RETURN_IF_ERROR(Norm(block.norm2, chunk.rows, width, residual, buffers_.delta));
  DORAD_RETURN_IF_ERROR(linear_.Run(block.fc1, rows, buffers_.normed, buffers_.wide));
  DORAD_RETURN_IF_CUDA_ERROR(
      kernels::GeluTanh(buffers_.wide, chunk.rows * vision_.inner, stream_.get()), kImage);
  DORAD_RETURN_IF_ERROR(linear_.Run(block.fc2, rows, buffers_.wide, buffers_.delta));
  return ToStatus(kernels::AddInPlace(residual, buffers_.delta, chunk.rows * width, stream_.get()),
                  kImage);
}

absl::Status VisionEncoder::Merge(const TowerWeights::Merger& merger, bool deepstack, int64_t level,
                                  const Chunk& chunk) {
  const int64_t patches_of_token = vision_.merge * vision_.merge;
  const int64_t tokens = chunk.rows / patches_of_token;
  const LinearRows& rows = Rows(tokens, /*adapted=*/true);
  float* const residual = buffers_.residual + chunk.begin * vision_.width;
  // The norm of a deepstack merger is that of whole tokens.
  DORAD_RETURN_IF_ERROR(
      deepstack ? Norm(merger.norm, tokens, vision_.merged_width(), residual, /*delta=*/nullptr)
                : Norm(merger.norm, chunk.rows, vision_.width, residual, /*delta=*/nullptr));
  DORAD_RETURN_IF_ERROR(linear_.Run(merger.fc1, rows, buffers_.normed, buffers_.wide));
  DORAD_RETURN_IF_CUDA_ERROR(
      kernels::Gelu(buffers_.wide, tokens * vision_.merged_width(), stream_.get()), kImage);
  const int64_t first = level * vision_.tokens(work_->grid) + chunk.begin / patches_of_token;
  return linear_.Run(merger.fc2, rows, buffers_.wide,
                     work_->features.as<float>() + first * vision_.output);
}

}  // namespace dorad::cuda
