#include "server/backends/cuda/decode_batch.h"

#include <algorithm>
#include <numeric>

#include "kernels/decoder/feed.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::cuda {

namespace {

constexpr char kStep[] = "the step";

}  // namespace

static_assert(DecodeBatch::kSizes.back() == kernels::kSegmentBlockRows);

absl::StatusOr<DecodeBatch> DecodeBatch::Create(AdapterSlots* slots, int64_t blocks_per_sequence,
                                                const RowKinds& kinds, MemoryLedger* ledger) {
  DecodeBatch batch(slots, kinds);
  Layout layout;
  batch.ids_at_ = layout.Add(kMaxRows * 4);
  batch.positions_at_ = layout.Add(kMaxRows * 4);
  batch.owners_at_ = layout.Add(kMaxRows * 4);
  batch.page_begin_at_ = layout.Add(kMaxRows * static_cast<int64_t>(kinds.windows.size()) * 4);
  batch.segments_at_ = layout.Add(kMaxRows * int64_t{sizeof(kernels::RowSegment)});
  batch.count_at_ = layout.Add(4);
  batch.rotary_at_ = layout.Add(kinds.rotary ? kMaxRows * 3 * 4 : 0);
  if (batch.has_states()) {
    batch.row_begin_at_ = layout.Add((kMaxRows + 1) * 4);
    batch.state_at_ = layout.Add(kMaxRows * 4);
    batch.state_from_at_ = layout.Add(kMaxRows * 4);
  }
  batch.pages_at_ = layout.Add((kMaxRows * kinds.PlacesOfRow(blocks_per_sequence) + 1) * 4);
  for (PinnedBuffer& host : batch.hosts_) {
    DORAD_ASSIGN_OR_RETURN(host, PinnedBuffer::Allocate(layout.bytes()));
  }
  DORAD_ASSIGN_OR_RETURN(batch.device_,
                         DeviceBuffer::Allocate(ledger, MemoryLedger::kWorkspace, layout.bytes()));
  return batch;
}

bool DecodeBatch::Takes(absl::Span<const engine::StepSequence> sequences) {
  int64_t rows = 0;
  for (const engine::StepSequence& s : sequences) {
    const auto count = static_cast<int64_t>(s.tokens.size());
    const bool is_image = s.follows < 0 && count > 0 && s.tokens[0] < 0;
    if (count == 0 || count > kMostRowsApart || s.samples.size() != s.tokens.size() || is_image) {
      return false;
    }
    rows += count;
  }
  return rows <= kMaxRows;
}

int DecodeBatch::SizeFor(int64_t rows) {
  return *std::lower_bound(kSizes.begin(), kSizes.end(), rows);
}

absl::Status DecodeBatch::Fill(const Stream& stream) {
  DORAD_RETURN_IF_ERROR(UploadPadded(engine::StepBatch({}), {}, kMaxRows, {}, stream));
  return stream.Synchronize("filling a batch");
}

absl::Status DecodeBatch::Upload(const engine::StepBatch& batch,
                                 absl::Span<const engine::StepSequence> sequences,
                                 const SampledTokens& previous, const Stream& stream) {
  return UploadPadded(batch, sequences, SizeFor(batch.rows), previous, stream);
}

absl::Status DecodeBatch::UploadPadded(const engine::StepBatch& batch,
                                       absl::Span<const engine::StepSequence> sequences,
                                       int64_t size, const SampledTokens& previous,
                                       const Stream& stream) {
  const PinnedBuffer& host = hosts_[next_];
  next_ = (next_ + 1) % hosts_.size();
  const int64_t rows = batch.rows;
  bool feed = false;
  int32_t page = 0;
  int32_t* const pages = host.as<int32_t>(pages_at_);
  int32_t* const ids = host.as<int32_t>(ids_at_);
  int32_t* const positions = host.as<int32_t>(positions_at_);
  int32_t* const owners = host.as<int32_t>(owners_at_);
  int32_t* const rotary = host.as<int32_t>(rotary_at_);
  int32_t* const page_begin = host.as<int32_t>(page_begin_at_);
  int32_t *row_begin = nullptr, *state = nullptr, *state_from = nullptr;
  if (has_states()) {
    row_begin = host.as<int32_t>(row_begin_at_);
    state = host.as<int32_t>(state_at_);
    state_from = host.as<int32_t>(state_from_at_);
    std::iota(row_begin, row_begin + size + 1, 0);
  }
  for (size_t i = 0; i < batch.order.size(); ++i) {
    const engine::StepSequence& s = sequences[batch.order[i]];
    const int64_t row = batch.row_begin[i];
    const auto count = static_cast<int64_t>(s.tokens.size());
    std::copy(s.tokens.begin(), s.tokens.end(), ids + row);
    ids[row] = FedToken(s, previous);
    feed = feed || s.follows >= 0;
    std::iota(positions + row, positions + row + count, static_cast<int32_t>(s.position));
    // The rows of a sequence share its list of pages.
    std::fill_n(owners + row, count, static_cast<int32_t>(row));
    if (kinds_.rotary) WriteRotary(s.images, s.position, count, rotary + 3 * row);
    WritePages(s, kinds_, pages, &page, page_begin + row, kMaxRows,
               has_states() ? state + row : nullptr, has_states() ? state_from + row : nullptr);
  }
  for (int64_t row = rows; row < size; ++row) {
    ids[row] = 0;
    positions[row] = 0;
    owners[row] = static_cast<int32_t>(row);
    if (kinds_.rotary) WriteRotary(nullptr, 0, 1, rotary + 3 * row);
    if (has_states()) state[row] = state_from[row] = -1;
    for (size_t group = 0; group < kinds_.windows.size(); ++group) {
      page_begin[row + static_cast<int64_t>(group) * kMaxRows] = page;
    }
  }
  pages[page] = kinds_.kv.Place(0);  // one for all padded rows
  slots_->BeginStep();
  DORAD_ASSIGN_OR_RETURN(const std::vector<AdapterRange> ranges,
                         ToRanges(batch.adapters, slots_, stream));
  auto* segments = host.as<kernels::RowSegment>(segments_at_);
  int32_t count = 0;
  for (const AdapterRange& range : ranges) {
    segments[count++] = {range.slot, static_cast<int32_t>(range.begin),
                         static_cast<int32_t>(range.end)};
  }
  // Padded rows join the last segment: its weights are read anyway.
  if (count == 0) segments[count++] = {-1, 0, 0};
  segments[count - 1].end = static_cast<int32_t>(size);
  *host.as<int32_t>(count_at_) = count;
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(device_.as<>(), host.as<>(), pages_at_ + (page + 1) * 4,
                      cudaMemcpyHostToDevice, stream.get()),
      kStep);
  if (!feed) return absl::OkStatus();
  return ToStatus(kernels::FeedTokens(device_.as<int32_t>(ids_at_), static_cast<int32_t>(rows),
                                      previous.tokens, stream.get()),
                  kStep);
}

std::vector<kernels::StepRows> DecodeBatch::rows(int size) const {
  kernels::StepStates states;
  if (has_states()) {
    states = {size, device_.as<int32_t>(row_begin_at_), device_.as<int32_t>(state_at_),
              device_.as<int32_t>(state_from_at_)};
  }
  const kernels::StepRows rows = {size,
                                  device_.as<int32_t>(ids_at_),
                                  device_.as<int32_t>(positions_at_),
                                  device_.as<int32_t>(owners_at_),
                                  device_.as<int32_t>(page_begin_at_),
                                  device_.as<int32_t>(pages_at_),
                                  kinds_.rotary ? device_.as<int32_t>(rotary_at_) : nullptr,
                                  states};
  return ByGroup(rows, kinds_, kMaxRows);
}

LinearRows DecodeBatch::linear(int size, bool adapted) const {
  LinearRows linear;
  linear.rows = size;
  linear.adapted = adapted;
  linear.table = slots_->table();
  linear.maps = slots_->maps();
  linear.segments = {device_.as<kernels::RowSegment>(segments_at_), device_.as<int32_t>(count_at_)};
  return linear;
}

}  // namespace dorad::cuda
