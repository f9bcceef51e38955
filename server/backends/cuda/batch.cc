#include "server/backends/cuda/batch.h"

#include <algorithm>
#include <utility>

#include "kernels/decoder/feed.h"
#include "server/engine/kv_needs.h"
#include "server/model/kv_groups.h"
#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

using engine::StepBatch;
using engine::StepSequence;
using engine::WantedRow;
using kernels::kSegmentBlockRows;
using kernels::RowSegment;

constexpr char kStep[] = "the step";

}  // namespace

absl::StatusOr<std::vector<AdapterRange>> ToRanges(absl::Span<const StepBatch::AdapterRows> rows,
                                                   AdapterSlots* slots, const Stream& stream) {
  std::vector<AdapterRange> ranges;
  for (const StepBatch::AdapterRows& range : rows) {
    AdapterRange to{nullptr, -1, range.begin, range.end};
    if (range.adapter != nullptr) {
      to.weights = static_cast<const CudaAdapterWeights*>(&range.adapter->weights());
      DORAD_ASSIGN_OR_RETURN(to.slot, slots->Assign(*to.weights, stream));
    }
    ranges.push_back(to);
  }
  return ranges;
}

RowKinds::RowKinds(const model::ModelConfig& model)
    : kv(KvLayoutOf(model)),
      windows(model::KvGroups(model).windows),
      rotary(model.has_rotary_positions()),
      bidirectional(model.vision.has_value() && model.vision->bidirectional),
      state_pages(StateLayoutOf(model).pages()) {}

namespace {

constexpr int64_t kListPages = kernels::kKvListTokens / kernels::kKvPageTokens;

// The blocks that a list of pages has for the sequence's rows.
struct Blocks {
  int64_t begin = 0;
  int64_t end = 0;
};

Blocks BlocksOf(const StepSequence& sequence, int64_t window) {
  const int64_t first = engine::FirstBlockSeen(window, sequence.position);
  return {first / kListPages * kListPages,
          engine::BlocksOf(sequence.position + static_cast<int64_t>(sequence.tokens.size()))};
}

}  // namespace

int64_t RowKinds::PlacesOfRow(int64_t blocks) const {
  int64_t places = 2 * state_pages;
  for (const int64_t window : windows) {
    // A window begins and ends within blocks, and its list before it.
    const int64_t most = engine::BlocksOf(window) + kListPages;
    places += window > 0 ? std::min(blocks, most) : blocks;
  }
  return places;
}

int64_t PlacesOf(const StepSequence& sequence, const RowKinds& kinds) {
  auto places = static_cast<int64_t>(sequence.state.size() + sequence.state_from.size());
  for (const int64_t window : kinds.windows) {
    const Blocks blocks = BlocksOf(sequence, window);
    places += blocks.end - blocks.begin;
  }
  return places;
}

void WritePages(const StepSequence& sequence, const RowKinds& kinds, int32_t* pages, int32_t* next,
                int32_t* begin, int64_t stride, int32_t* state, int32_t* state_from) {
  const KvLayout& kv = kinds.kv;
  const size_t groups = kinds.windows.size();
  for (size_t group = 0; group < groups; ++group) {
    const Blocks blocks = BlocksOf(sequence, kinds.windows[group]);
    begin[static_cast<int64_t>(group) * stride] = *next - static_cast<int32_t>(blocks.begin);
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      // Before a window there may be none, -1: the spare page stands there, and is not read.
      pages[(*next)++] = kv.Place(sequence.pages[block * groups + group] + kSparePages);
    }
  }
  // Returns where they begin.
  const auto write = [&](absl::Span<const int32_t> from) {
    std::transform(from.begin(), from.end(), pages + *next,
                   [&kv](int32_t page) { return kv.Place(page + kSparePages); });
    return std::exchange(*next, *next + static_cast<int32_t>(from.size()));
  };
  if (state == nullptr) return;
  *state = sequence.state.empty() ? -1 : write(sequence.state);
  if (!sequence.state_from.empty()) {
    *state_from = write(sequence.state_from);
  } else {
    *state_from = sequence.position > 0 ? *state : -1;
  }
}

std::vector<kernels::StepRows> ByGroup(const kernels::StepRows& rows, const RowKinds& kinds,
                                       int64_t stride) {
  std::vector<kernels::StepRows> by_group(kinds.windows.size(), rows);
  for (size_t group = 0; group < by_group.size(); ++group) {
    by_group[group].page_begin += static_cast<int64_t>(group) * stride;
  }
  return by_group;
}

void WriteRotary(const engine::PromptImages* images, int64_t position, int64_t count, int32_t* to) {
  for (int64_t p = position; p < position + count; ++p) {
    engine::PromptImages::RotaryPosition at = {p, p, p};
    if (images != nullptr) at = images->PositionOf(p);
    for (const int64_t axis : {at.time, at.height, at.width}) *to++ = static_cast<int32_t>(axis);
  }
}

bool SharesReads(const StepBatch& batch, absl::Span<const StepSequence> sequences, int64_t groups,
                 int64_t least_positions) {
  int64_t positions = 0;
  for (const StepSequence& s : sequences) {
    const auto rows = static_cast<int64_t>(s.tokens.size());
    if (rows <= kMostRowsApart) positions += rows * (s.position + 1);
  }
  if (positions < least_positions) return false;
  int64_t common = 0;
  const StepSequence* last = nullptr;
  for (const size_t index : batch.order) {
    const StepSequence& s = sequences[index];
    const auto rows = static_cast<int64_t>(s.tokens.size());
    if (rows == 0 || rows > kMostRowsApart) continue;
    common += (rows - 1) * s.position;
    if (last != nullptr) {
      const auto [end, other_end] =
          std::mismatch(s.pages.begin(), s.pages.end(), last->pages.begin(), last->pages.end());
      const int64_t blocks = (end - s.pages.begin()) / groups;
      common += std::min({blocks * engine::kKvPageTokens, s.position, last->position});
    }
    last = &s;
  }
  return 8 * common >= positions;
}

bool IsAdapted(absl::Span<const StepBatch::AdapterRows> rows) {
  return std::any_of(rows.begin(), rows.end(),
                     [](const StepBatch::AdapterRows& range) { return range.adapter != nullptr; });
}

namespace {

// The sequence's rows of images; `begin`: its first row in the step.
void AppendImageRows(const StepSequence& s, int64_t begin, std::vector<ImageRows>* to) {
  const int64_t end = s.position + static_cast<int64_t>(s.tokens.size());
  for (const engine::PromptImages::Run& run : s.images->RunsIn(s.position, end)) {
    to->push_back({begin + run.begin - s.position, run.count, run.first,
                   static_cast<const CudaImageFeatures*>(s.features[run.image].get())});
  }
}

// The last positions that `count` rows of a sequence from `position` on see.
void WriteReach(const engine::PromptImages* images, int64_t position, int64_t count, int32_t* to) {
  for (int64_t p = position; p < position + count; ++p) {
    *to++ = static_cast<int32_t>(images == nullptr ? p : images->LastSeenBy(p));
  }
}

}  // namespace

void WriteSegments(LinearRows* linear, ArrayWriter& writer) {
  const int64_t blocks = (linear->rows + kSegmentBlockRows - 1) / kSegmentBlockRows;
  RowSegment* segments = writer.Array(blocks * kSegmentBlockRows, &linear->segments.blocks);
  int32_t* counts = writer.Array(blocks, &linear->segments.counts);
  RowSegment* whole =
      writer.Array(static_cast<int64_t>(linear->ranges.size()), &linear->range_segments);
  if (!writer.writing()) return;
  std::fill_n(counts, blocks, 0);
  for (const AdapterRange& range : linear->ranges) {
    *whole++ = {range.slot, static_cast<int32_t>(range.begin), static_cast<int32_t>(range.end)};
    for (int64_t begin = range.begin; begin < range.end;) {
      const int64_t block = begin / kSegmentBlockRows;
      const int64_t first = block * kSegmentBlockRows;
      const int64_t end = std::min(range.end, first + kSegmentBlockRows);
      segments[first + counts[block]++] = {range.slot, static_cast<int32_t>(begin - first),
                                           static_cast<int32_t>(end - first)};
      begin = end;
    }
  }
}

absl::Status DeviceBatch::MakeBlocks(absl::Span<const WantedRow> rows,
                                     absl::Span<const StepSequence> sequences, const Stream& stream,
                                     std::vector<LogitsBlock>* blocks) {
  blocks->clear();
  for (int64_t begin = 0; begin < static_cast<int64_t>(rows.size()); begin += max_logits_rows_) {
    LogitsBlock block;
    block.wanted = rows.subspan(begin, max_logits_rows_);
    std::vector<StepBatch::AdapterRows> adapters;
    for (const WantedRow& row : block.wanted) {
      engine::AppendRows(sequences[row.sequence].adapter, block.linear.rows++, 1, &adapters);
    }
    DORAD_ASSIGN_OR_RETURN(block.linear.ranges, ToRanges(adapters, &slots_, stream));
    block.linear.adapted = IsAdapted(adapters);
    block.linear.table = slots_.table();
    block.linear.maps = slots_.maps();
    blocks->push_back(std::move(block));
  }
  return absl::OkStatus();
}

absl::Status DeviceBatch::Upload(const StepBatch& batch, absl::Span<const StepSequence> sequences,
                                 const Stream& stream, const SampledTokens& previous) {
  const auto count = static_cast<int64_t>(sequences.size());
  bool feed = false;
  slots_.BeginStep();
  DORAD_ASSIGN_OR_RETURN(linear_.ranges, ToRanges(batch.adapters, &slots_, stream));
  linear_.adapted = IsAdapted(batch.adapters);
  linear_.rows = batch.rows;
  linear_.table = slots_.table();
  linear_.maps = slots_.maps();
  DORAD_RETURN_IF_ERROR(MakeBlocks(batch.samples, sequences, stream, &samples_));
  DORAD_RETURN_IF_ERROR(MakeBlocks(batch.scores, sequences, stream, &scores_));
  int64_t num_pages = 0;
  for (const StepSequence& s : sequences) num_pages += PlacesOf(s, kinds_);
  sequences_ = count;
  images_.clear();
  for (int64_t i = 0; i < count; ++i) {
    const StepSequence& s = sequences[batch.order[i]];
    if (s.images != nullptr) AppendImageRows(s, batch.row_begin[i], &images_);
  }
  rows_.reach = nullptr;

  const auto write_rows = [&](ArrayWriter& writer) {
    int32_t* ids = writer.Array(batch.rows, &rows_.token_ids);
    int32_t* positions = writer.Array(batch.rows, &rows_.positions);
    int32_t* owners = writer.Array(batch.rows, &rows_.sequences);
    int32_t* page_begin =
        writer.Array(count * static_cast<int64_t>(kinds_.windows.size()), &rows_.page_begin);
    int32_t* pages = writer.Array(num_pages, &rows_.pages);
    int32_t* rotary = kinds_.rotary ? writer.Array(3 * batch.rows, &rows_.rotary) : nullptr;
    int32_t *row_begin = nullptr, *state = nullptr, *state_from = nullptr;
    if (kinds_.state_pages > 0) {
      rows_.states.sequences = static_cast<int32_t>(count);
      row_begin = writer.Array(count + 1, &rows_.states.row_begin);
      state = writer.Array(count, &rows_.states.to);
      state_from = writer.Array(count, &rows_.states.from);
    }
    const bool sees_images = kinds_.bidirectional && !images_.empty();
    int32_t* reach = sees_images ? writer.Array(batch.rows, &rows_.reach) : nullptr;
    if (!writer.writing()) return;
    rows_.rows = static_cast<int32_t>(batch.rows);
    int32_t page = 0;
    for (int64_t i = 0; i < count; ++i) {
      const StepSequence& s = sequences[batch.order[i]];
      const auto tokens = static_cast<int64_t>(s.tokens.size());
      const int64_t row = batch.row_begin[i];
      // An image's rows are replaced: any token stands for them.
      std::transform(s.tokens.begin(), s.tokens.end(), ids + row,
                     [](engine::TokenId token) { return std::max(token, 0); });
      if (rotary != nullptr) WriteRotary(s.images, s.position, tokens, rotary + 3 * row);
      if (s.follows >= 0) {
        ids[row] = FedToken(s, previous);
        feed = true;
      }
      for (int64_t r = 0; r < tokens; ++r) {
        positions[row + r] = static_cast<int32_t>(s.position + r);
      }
      if (sees_images) WriteReach(s.images, s.position, tokens, reach + row);
      std::fill_n(owners + row, tokens, static_cast<int32_t>(i));
      WritePages(s, kinds_, pages, &page, page_begin + i, count,
                 state == nullptr ? nullptr : state + i,
                 state == nullptr ? nullptr : state_from + i);
      if (row_begin != nullptr) {
        row_begin[i] = static_cast<int32_t>(row);
        row_begin[i + 1] = static_cast<int32_t>(row + tokens);
      }
    }
  };
  const auto write_blocks = [&](ArrayWriter& writer, std::vector<LogitsBlock>& blocks) {
    for (LogitsBlock& block : blocks) {
      int32_t* indices = writer.Array(block.linear.rows, &block.row_indices);
      for (int64_t i = 0; i < block.linear.rows && writer.writing(); ++i) {
        indices[i] = static_cast<int32_t>(block.wanted[i].row);
      }
      WriteSegments(&block.linear, writer);
    }
  };
  const auto write_all = [&](ArrayWriter& writer) {
    write_rows(writer);
    WriteSegments(&linear_, writer);
    write_blocks(writer, samples_);
    write_blocks(writer, scores_);
  };

  Buffers& buffers = buffers_[next_];
  next_ = (next_ + 1) % buffers_.size();
  ArrayWriter measure(nullptr, nullptr);
  write_all(measure);
  if (measure.bytes() > buffers.host.bytes()) {
    const int64_t bytes = std::max(2 * buffers.host.bytes(), measure.bytes());
    DORAD_ASSIGN_OR_RETURN(buffers.device,
                           DeviceBuffer::Allocate(ledger_, MemoryLedger::kWorkspace, bytes));
    DORAD_ASSIGN_OR_RETURN(buffers.host, PinnedBuffer::Allocate(bytes));
  }
  ArrayWriter writer(buffers.host.as(), buffers.device.as<std::byte>());
  write_all(writer);
  DORAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(buffers.device.as<>(), buffers.host.as<>(),
                                             writer.bytes(), cudaMemcpyHostToDevice, stream.get()),
                             kStep);
  if (!feed) return absl::OkStatus();
  return ToStatus(kernels::FeedTokens(const_cast<int32_t*>(rows_.token_ids), rows_.rows,
                                      previous.tokens, stream.get()),
                  kStep);
}

}  // namespace dorad::cuda
