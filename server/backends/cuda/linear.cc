#include "server/backends/cuda/linear.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "kernels/dora/linear.h"
#include "kernels/dora/linear_prefill.h"
#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

static_assert(kernels::kDoraLinearMaxRows == kernels::kSegmentBlockRows);

constexpr char kStep[] = "the step";

kernels::DoraLinearShape ShapeOf(const LinearGroup& group) {
  kernels::DoraLinearShape shape;
  shape.in = static_cast<int32_t>(group.in);
  shape.parts = static_cast<int32_t>(group.outs.size());
  for (size_t i = 0; i < group.outs.size(); ++i) {
    shape.out[i] = static_cast<int32_t>(group.outs[i]);
  }
  return shape;
}

// For blocks of so many rows; 0 for shapes that the kernel does not support.
size_t WorkspaceBytes(const LinearGroup& group, int rows) {
  return kernels::DoraLinearWorkspaceBytes(ShapeOf(group), rows, kMaxRank);
}

// With fewer rows than that for each adapter, reading the weights once for each block is faster
// than one launch for all rows, whose tiles multiply by each of their adapters. The results are the
// same.
constexpr int64_t kRowsOfAnAdapter = 40;

// For so many rows in one launch; 0 for shapes that it does not support.
size_t PrefillBytes(const LinearGroup& group, int64_t rows) {
  return kernels::DoraLinearPrefillWorkspaceBytes(ShapeOf(group), static_cast<int>(rows), kMaxRank);
}

}  // namespace

bool Linear::IsFused(const LinearGroup& group) { return WorkspaceBytes(group, 1) > 0; }

bool Linear::TakesAtOnce(const LinearGroup& group, const LinearRows& rows) const {
  const auto ranges = static_cast<int64_t>(rows.ranges.size());
  return rows.rows > kernels::kSegmentBlockRows && ranges <= kernels::kPrefillMaxSegments &&
         (ranges == 1 || ranges * kRowsOfAnAdapter <= rows.rows) &&
         PrefillBytes(group, rows.rows) > 0;
}

absl::StatusOr<Linear> Linear::Create(absl::Span<const LinearGroup* const> groups, int64_t max_rows,
                                      kernels::KernelIsa isa, MemoryLedger* ledger,
                                      const Stream* stream) {
  size_t bytes = kernels::kDoraLinearSignalBytes;
  int64_t widest = 0;  // of the library's
  for (const LinearGroup* group : groups) {
    if (!IsFused(*group)) widest = std::max(widest, group->out);
    bytes = std::max(bytes, WorkspaceBytes(*group, kernels::kDoraLinearMaxRows));
    bytes = std::max(bytes, PrefillBytes(*group, max_rows));
  }
  Linear linear(isa, stream);
  if (widest > 0) {
    DORAD_ASSIGN_OR_RETURN(LibraryLinear library,
                           LibraryLinear::Create(*stream, max_rows, widest, ledger));
    linear.library_.emplace(std::move(library));
  }
  DORAD_ASSIGN_OR_RETURN(linear.workspace_, DeviceBuffer::Allocate(ledger, MemoryLedger::kWorkspace,
                                                                   static_cast<int64_t>(bytes)));
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(linear.workspace_.as<>(), 0, kernels::kDoraLinearSignalBytes, stream->get()),
      kStep);
  return linear;
}

absl::Status Linear::Run(const LinearGroup& group, const LinearRows& rows, const __nv_bfloat16* x,
                         float* y) {
  return RunAs(group, rows, x, y);
}

absl::Status Linear::Run(const LinearGroup& group, const LinearRows& rows, const __nv_bfloat16* x,
                         __nv_bfloat16* y) {
  return RunAs(group, rows, x, y);
}

template <typename T>
absl::Status Linear::RunAs(const LinearGroup& group, const LinearRows& rows, const __nv_bfloat16* x,
                           T* y) {
  if (!IsFused(group)) return library_->Run(group, rows, x, y);
  if (TakesAtOnce(group, rows)) {
    kernels::DoraLinearPrefillParams params;
    params.isa = isa_;
    params.shape = ShapeOf(group);
    params.rows = static_cast<int32_t>(rows.rows);
    params.max_rank = rows.adapted ? kMaxRank : 0;
    params.x = x;
    params.w = group.weight;
    params.bias = group.bias;
    params.table = rows.table;
    params.maps = rows.maps;
    params.first_module = group.first_module;
    params.segments = rows.range_segments;
    params.num_segments = static_cast<int32_t>(rows.ranges.size());
    params.y = y;
    params.y_fp32 = std::is_same_v<T, float>;
    params.workspace = workspace_.as<>();
    params.workspace_bytes = static_cast<size_t>(workspace_.bytes());
    return ToStatus(kernels::DoraLinearPrefill(params, stream_->get()), kStep);
  }
  kernels::DoraLinearParams params;
  params.isa = isa_;
  params.shape = ShapeOf(group);
  params.max_rank = rows.adapted ? kMaxRank : 0;
  params.w = group.weight;
  params.bias = group.bias;
  params.table = rows.table;
  params.maps = rows.maps;
  params.first_module = group.first_module;
  params.y_fp32 = std::is_same_v<T, float>;
  params.workspace = workspace_.as<>();
  params.workspace_bytes = static_cast<size_t>(workspace_.bytes());
  for (int64_t begin = 0; begin < rows.rows; begin += kernels::kSegmentBlockRows) {
    const int64_t block = begin / kernels::kSegmentBlockRows;
    params.rows =
        static_cast<int32_t>(std::min<int64_t>(rows.rows - begin, kernels::kSegmentBlockRows));
    params.x = x + begin * group.in;
    params.y = y + begin * group.out;
    params.segments = rows.segments.blocks + begin;
    params.num_segments = rows.segments.counts + block;
    DORAD_RETURN_IF_CUDA_ERROR(kernels::DoraLinear(params, stream_->get()), kStep);
  }
  return absl::OkStatus();
}

}  // namespace dorad::cuda
