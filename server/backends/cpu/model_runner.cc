#include "server/backends/cpu/model_runner.h"

#include <ATen/ATen.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "server/backends/cpu/decoder.h"
#include "server/backends/cpu/row_sampling.h"
#include "server/backends/cpu/vision_encoder.h"
#include "server/engine/step_batch.h"
#include "server/platform/exception.h"
#include "server/platform/files/elements.h"

namespace dorad::engine {
namespace {

static_assert(kKvPageTokens == ops::kPageTokens);

// nullptr for the base.
const adapter::CpuAdapterWeights* WeightsOf(const adapter::LoadedAdapter* adapter) {
  if (adapter == nullptr) return nullptr;
  return static_cast<const adapter::CpuAdapterWeights*>(&adapter->weights());
}

std::vector<model::AdapterRows> ToModel(absl::Span<const StepBatch::AdapterRows> ranges) {
  std::vector<model::AdapterRows> out;
  for (const StepBatch::AdapterRows& range : ranges) {
    out.push_back({WeightsOf(range.adapter), range.begin, range.end});
  }
  return out;
}

struct CpuImageFeatures final : ImageFeatures {
  explicit CpuImageFeatures(at::Tensor features) : features(std::move(features)) {}
  int64_t bytes() const override { return static_cast<int64_t>(features.nbytes()); }

  const at::Tensor features;  // model::ImageRows::features
};

// The sequence's rows of images; `begin`: its first row in the batch.
void AppendImageRows(const StepSequence& s, int64_t begin, std::vector<model::ImageRows>* to) {
  const int64_t end = s.position + static_cast<int64_t>(s.tokens.size());
  for (const PromptImages::Run& run : s.images->RunsIn(s.position, end)) {
    const auto& features = static_cast<const CpuImageFeatures&>(*s.features[run.image]);
    to->push_back({begin + run.begin - s.position, run.count, run.first, features.features});
  }
}

std::vector<std::array<int64_t, 3>> RotaryPositions(const StepSequence& s) {
  std::vector<std::array<int64_t, 3>> positions;
  for (size_t i = 0; i < s.tokens.size(); ++i) {
    const auto p = s.images->PositionOf(s.position + static_cast<int64_t>(i));
    positions.push_back({p.time, p.height, p.width});
  }
  return positions;
}

std::vector<int64_t> Reach(const StepSequence& s) {
  std::vector<int64_t> reach;
  for (size_t i = 0; i < s.tokens.size(); ++i) {
    reach.push_back(s.images->LastSeenBy(s.position + static_cast<int64_t>(i)));
  }
  return reach;
}

// Returns the whole pages within the range to the system; they read as zeros when touched again.
int64_t GiveBack(std::byte* begin, std::byte* end) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page;
  const uintptr_t last = reinterpret_cast<uintptr_t>(end) / page * page;
  if (first >= last) return 0;
  // Only a hint: a failure keeps the memory and is harmless.
  const int failed = madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  return failed == 0 ? static_cast<int64_t>(last - first) : 0;
}

class CpuModelRunner final : public ModelRunner {
 public:
  CpuModelRunner(const model::LoadedModel& model, int64_t kv_pages, int64_t max_positions)
      : decoder_(model, max_positions),
        has_rotary_positions_(model.config().has_rotary_positions()),
        vocab_size_(model.config().vocab_size),
        kv_(decoder_.AllocateKv(kv_pages)),
        kv_pages_(kv_pages) {
    if (!model.config().vision) return;
    first_tower_module_ = model.config().head + 1;
    bidirectional_ = model.config().vision->bidirectional;
    encoder_.emplace(model);
  }

  int64_t kv_pages() const override { return kv_pages_; }
  std::vector<int64_t> windows() const override { return decoder_.groups().windows; }
  int64_t state_pages() const override { return decoder_.state_layout().pages(); }

  // Computes on the engine's thread: no two steps could overlap.
  int max_steps_in_flight() const override { return 1; }

  absl::Status Begin(absl::Span<const StepSequence> sequences) override {
    // The one place where libtorch's exceptions are caught.
    try {
      outputs_ = RunUnchecked(sequences);
    } catch (...) {
      return StatusOfException("the step", "STEP_FAILED");
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<StepOutput>> Finish() override { return std::move(outputs_); }

  bool ChangesImages(const adapter::LoadedAdapter& adapter) const override {
    const auto& modules = WeightsOf(&adapter)->modules;
    return std::any_of(modules.begin() + first_tower_module_, modules.end(),
                       [](const auto& factors) { return factors.has_value(); });
  }

  // One by one: the cores are busy with one.
  absl::StatusOr<std::vector<std::shared_ptr<const ImageFeatures>>> EncodeImages(
      absl::Span<const Image* const> images, const adapter::LoadedAdapter* adapter,
      bool /*alone*/) override {
    const Image& image = *images[0];
    try {
      const int64_t patches = image.height * image.width;
      const auto elements =
          static_cast<int64_t>(image.pixels.size() / SizeOf(image.pixel_dtype())) / patches;
      const at::Tensor pixels = at::empty({patches, elements}, at::kFloat);
      ToFloat(image.pixel_dtype(),
              {reinterpret_cast<const std::byte*>(image.pixels.data()), image.pixels.size()},
              pixels.mutable_data_ptr<float>());
      const model::ImageGrid grid{/*frames=*/1, image.height, image.width};
      return {{std::make_shared<const CpuImageFeatures>(
          encoder_->Encode(pixels, grid, WeightsOf(adapter)))}};
    } catch (...) {
      return StatusOfException("computing an image", "STEP_FAILED");
    }
  }

  // The cache lies in host memory: kept pages stay in place.
  absl::StatusOr<int64_t> ReleaseKv(absl::Span<const int32_t> keep) override {
    int64_t released = 0;
    for (const ops::PagedKv& slot : kv_) {
      for (const at::Tensor* tensor : {&slot.k, &slot.v}) {
        const int64_t page_bytes = static_cast<int64_t>(tensor->nbytes()) / kv_pages_;
        auto* const begin = static_cast<std::byte*>(tensor->mutable_data_ptr());
        int64_t page = 0;
        for (size_t i = 0; i <= keep.size(); ++i) {
          const int64_t end = i < keep.size() ? keep[i] : kv_pages_;
          released += GiveBack(begin + page * page_bytes, begin + end * page_bytes);
          page = end + 1;
        }
      }
    }
    return released;
  }

  absl::Status RestoreKv() override { return absl::OkStatus(); }

 private:
  std::vector<StepOutput> RunUnchecked(absl::Span<const StepSequence> sequences) {
    const size_t groups = decoder_.groups().windows.size();
    for (const StepSequence& s : sequences) {
      const int32_t* const to = s.pages.data() + s.position / kKvPageTokens * groups;
      for (size_t i = 0; i < s.copy_from.size(); ++i) CopyPage(s.copy_from[i], to[i]);
    }
    const StepBatch batch(sequences);
    const at::Tensor token_ids = at::empty({batch.rows}, at::kInt);
    std::vector<std::vector<ops::SequenceRows>> rows(groups);
    std::vector<std::vector<int32_t>> tables;  // of pages
    tables.reserve(batch.order.size() * groups);
    std::vector<model::StatePages> states;
    std::vector<model::ImageRows> images;
    for (size_t i = 0; i < batch.order.size(); ++i) {
      const StepSequence& s = sequences[batch.order[i]];
      if (s.tokens.empty()) continue;
      const int64_t begin = batch.row_begin[i];
      std::transform(s.tokens.begin(), s.tokens.end(), token_ids.data_ptr<int32_t>() + begin,
                     [](TokenId id) { return std::max(id, 0); });
      ops::SequenceRows of_sequence{
          begin, static_cast<int64_t>(s.tokens.size()), s.position, {}, {}, {}};
      if (!s.state.empty()) {
        states.push_back({s.state, s.state_from});
        if (s.state_from.empty() && s.position > 0) states.back().from = s.state;
      }
      if (s.images != nullptr) {
        AppendImageRows(s, begin, &images);
        if (bidirectional_) of_sequence.reach = Reach(s);
        if (has_rotary_positions_) of_sequence.rotary = RotaryPositions(s);
      }
      for (size_t group = 0; group < groups; ++group) {
        std::vector<int32_t>& table = tables.emplace_back();
        for (size_t at = group; at < s.pages.size(); at += groups) table.push_back(s.pages[at]);
        of_sequence.pages = table;
        rows[group].push_back(of_sequence);
      }
    }
    const at::Tensor hidden =
        decoder_.Forward({token_ids, rows, states, ToModel(batch.adapters), images}, kv_);
    std::vector<StepOutput> outputs(sequences.size());
    ForEachBlock(batch.samples, hidden, sequences, SampleRows, &outputs);
    ForEachBlock(batch.scores, hidden, sequences, ScoreRows, &outputs);
    return outputs;
  }

  void CopyPage(int32_t from, int32_t to) {
    for (const ops::PagedKv& slot : kv_) {
      for (const at::Tensor* tensor : {&slot.k, &slot.v}) {
        const int64_t page_bytes = static_cast<int64_t>(tensor->nbytes()) / kv_pages_;
        auto* const begin = static_cast<std::byte*>(tensor->mutable_data_ptr());
        std::memcpy(begin + to * page_bytes, begin + from * page_bytes, page_bytes);
      }
    }
  }

  template <typename Use>
  void ForEachBlock(absl::Span<const WantedRow> rows, const at::Tensor& hidden,
                    absl::Span<const StepSequence> sequences, Use use,
                    std::vector<StepOutput>* outputs) const {
    for (size_t begin = 0; begin < rows.size(); begin += kLogitsRows) {
      const absl::Span<const WantedRow> block = rows.subspan(begin, kLogitsRows);
      at::Tensor index = at::empty({static_cast<int64_t>(block.size())}, at::kLong);
      std::vector<StepBatch::AdapterRows> adapters;
      for (size_t i = 0; i < block.size(); ++i) {
        index.data_ptr<int64_t>()[i] = block[i].row;
        AppendRows(sequences[block[i].sequence].adapter, static_cast<int64_t>(i), 1, &adapters);
      }
      const at::Tensor logits = decoder_.Logits(hidden.index_select(0, index), ToModel(adapters));
      use(block, logits.const_data_ptr<float>(), vocab_size_, sequences, outputs);
    }
  }

  const model::Decoder decoder_;
  std::optional<model::VisionEncoder> encoder_;  // with a tower
  int first_tower_module_ = 0;
  const bool has_rotary_positions_;
  bool bidirectional_ = false;  // VisionConfig's
  const int64_t vocab_size_;
  std::vector<ops::PagedKv> kv_;
  const int64_t kv_pages_;
  std::vector<StepOutput> outputs_;  // of the step in flight
};

}  // namespace

std::unique_ptr<ModelRunner> MakeCpuModelRunner(const model::LoadedModel& model, int64_t kv_pages,
                                                int64_t max_positions) {
  return std::make_unique<CpuModelRunner>(model, kv_pages, max_positions);
}

}  // namespace dorad::engine
