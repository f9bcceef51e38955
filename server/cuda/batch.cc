#include "server/cuda/batch.h"

#include <algorithm>

namespace dorad::cuda {
namespace {

constexpr char kStep[] = "the step";

}  // namespace

std::vector<AdapterRange> ToRanges(absl::Span<const engine::StepBatch::AdapterRows> rows) {
  std::vector<AdapterRange> ranges;
  for (const engine::StepBatch::AdapterRows& range : rows) {
    const auto* weights = range.adapter == nullptr
                              ? nullptr
                              : static_cast<const CudaAdapterWeights*>(&range.adapter->weights());
    ranges.push_back({weights, range.begin, range.end});
  }
  return ranges;
}

absl::Status DeviceBatch::Upload(const engine::StepBatch& batch,
                                 absl::Span<const engine::StepSequence> sequences,
                                 const Stream& stream) {
  ranges_ = ToRanges(batch.adapters);
  int64_t pages = 0;
  for (const engine::StepSequence& s : sequences) pages += static_cast<int64_t>(s.pages.size());
  const auto count = static_cast<int64_t>(sequences.size());
  const auto slots = static_cast<int64_t>(ranges_.size());
  Layout layout;
  const int64_t ids_at = layout.Add(batch.rows * 4);
  const int64_t positions_at = layout.Add(batch.rows * 4);
  const int64_t sequences_at = layout.Add(batch.rows * 4);
  const int64_t page_begin_at = layout.Add(count * 4);
  const int64_t pages_at = layout.Add(pages * 4);
  const int64_t segments_at = layout.Add(slots * static_cast<int64_t>(sizeof(kernels::RowSegment)));
  const int64_t num_segments_at = layout.Add(4);
  const int64_t factors_at =
      layout.Add(slots * modules_ * static_cast<int64_t>(sizeof(kernels::DoraFactors)));
  // The last step's copy has ended: its results have been read.
  if (layout.bytes() > host_.bytes()) {
    const int64_t bytes = std::max(2 * host_.bytes(), layout.bytes());
    DORAD_ASSIGN_OR_RETURN(host_, PinnedBuffer::Allocate(bytes));
    DORAD_ASSIGN_OR_RETURN(device_, DeviceBuffer::Allocate(ledger_, "workspace", bytes));
  }

  int32_t page = 0;
  for (int64_t i = 0; i < count; ++i) {
    const engine::StepSequence& s = sequences[batch.order[i]];
    const auto tokens = static_cast<int64_t>(s.tokens.size());
    for (int64_t r = 0; r < tokens; ++r) {
      const int64_t row = batch.row_begin[i] + r;
      host_.as<int32_t>(ids_at)[row] = s.tokens[r];
      host_.as<int32_t>(positions_at)[row] = static_cast<int32_t>(s.position + r);
      host_.as<int32_t>(sequences_at)[row] = static_cast<int32_t>(i);
    }
    host_.as<int32_t>(page_begin_at)[i] = page;
    std::copy(s.pages.begin(), s.pages.end(), host_.as<int32_t>(pages_at) + page);
    page += static_cast<int32_t>(s.pages.size());
  }
  for (int64_t i = 0; i < slots; ++i) {
    const AdapterRange& range = ranges_[i];
    const bool base = range.weights == nullptr;
    host_.as<kernels::RowSegment>(segments_at)[i] = {base ? -1 : static_cast<int32_t>(i),
                                                     static_cast<int32_t>(range.begin),
                                                     static_cast<int32_t>(range.end)};
    auto* factors = host_.as<kernels::DoraFactors>(factors_at) + i * modules_;
    if (!base) std::copy_n(range.weights->modules().begin(), modules_, factors);
  }
  *host_.as<int32_t>(num_segments_at) = static_cast<int32_t>(slots);
  DORAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(device_.as<>(), host_.as<>(), layout.bytes(),
                                             cudaMemcpyHostToDevice, stream.get()),
                             kStep);
  rows_ = {static_cast<int32_t>(batch.rows),   device_.as<int32_t>(ids_at),
           device_.as<int32_t>(positions_at),  device_.as<int32_t>(sequences_at),
           device_.as<int32_t>(page_begin_at), device_.as<int32_t>(pages_at)};
  adapters_ = {device_.as<kernels::DoraFactors>(factors_at), modules_};
  segments_ = device_.as<kernels::RowSegment>(segments_at);
  num_segments_ = device_.as<int32_t>(num_segments_at);
  return absl::OkStatus();
}

}  // namespace dorad::cuda
