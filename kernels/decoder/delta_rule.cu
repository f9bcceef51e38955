// The gated delta rule, row by row.
#include "kernels/decoder/delta_state.cuh"
#include "kernels/isa/barrier.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/memory.cuh"

namespace dorad::kernels {
namespace delta {
namespace {

constexpr int kStageRows = 16;

// Begins to copy rows of the step to a stage.
__device__ inline void CopyRows(const DeltaParams& p, const Columns& columns, int first, int count,
                                Row* stage) {
  constexpr int kPieces = kMostKeys / 4;  // of a query or a key, 16 bytes each
  const DeltaShape& shape = p.shape;
  const int key_head = columns.head / (shape.value_heads / shape.key_heads);
  for (int i = threadIdx.x; i < 2 * kPieces * count; i += kThreads) {
    const int row = i / (2 * kPieces), piece = i % kPieces;
    const bool is_key = i / kPieces % 2 != 0;
    const float* const head = p.mixed + int64_t{first + row} * shape.qkv_size() +
                              (is_key ? shape.key_size() : 0) + key_head * shape.key_dim;
    const bool is_in = 4 * piece < shape.key_dim;
    float4* const to = (is_key ? stage[row].k : stage[row].q) + piece;
    CopyAsync16(SharedAddress(to), head + (is_in ? 4 * piece : 0), is_in);
  }
  for (int i = threadIdx.x; i < kColumns * count; i += kThreads) {
    const int row = i / kColumns, column = i % kColumns;
    if (column >= columns.columns) continue;
    CopyAsync4(SharedAddress(stage[row].v + column),
               p.mixed + int64_t{first + row} * shape.qkv_size() + 2 * shape.key_size() +
                   columns.head * shape.value_dim + columns.column + column);
  }
  for (int i = threadIdx.x; i < 2 * count; i += kThreads) {
    Row& row = stage[i / 2];
    CopyAsync4(SharedAddress(i % 2 == 0 ? &row.update : &row.decay),
               p.factors + (int64_t{first + i / 2} * 2 + i % 2) * shape.value_heads + columns.head);
  }
}

// Four neighbouring columns of a state's block, from `at` on. kWhole: all are there, and aligned.
template <bool kWhole>
__device__ inline float4 LoadColumns(const float* at, int columns) {
  if constexpr (kWhole) return __ldcg(reinterpret_cast<const float4*>(at));
  return {columns > 0 ? __ldcg(at) : 0.0f, columns > 1 ? __ldcg(at + 1) : 0.0f,
          columns > 2 ? __ldcg(at + 2) : 0.0f, columns > 3 ? __ldcg(at + 3) : 0.0f};
}

template <bool kWhole>
__device__ inline void StoreColumns(float* at, int columns, const float4& x) {
  if constexpr (kWhole) {
    __stcg(reinterpret_cast<float4*>(at), x);
    return;
  }
  if (columns > 0) __stcg(at, x.x);
  if (columns > 1) __stcg(at + 1, x.y);
  if (columns > 2) __stcg(at + 2, x.z);
  if (columns > 3) __stcg(at + 3, x.w);
}

// One block for up to kColumns columns of a state's block, for any rows. kWhole: all kMostKeys are
// there, and columns come in aligned fours.
template <bool kWhole>
__global__ void __launch_bounds__(kThreads) RuleKernel(const DeltaParams p, int parts) {
  __shared__ __align__(16) Row stages[2][kStageRows];
  LaunchDependents();
  // Long runs tend to be a step's last: they start first.
  const int sequence = gridDim.y - 1 - blockIdx.y;
  const int begin = p.rows.states.row_begin[sequence];
  const int count = p.rows.states.row_begin[sequence + 1] - begin;
  const int from = p.rows.states.from[sequence], to = p.rows.states.to[sequence];
  if (count == 0 || to < 0) {
    WaitForPrevious();
    return;
  }
  const Columns columns = ColumnsOf(p, blockIdx.x, parts);
  const int part = threadIdx.x % kParts, column = threadIdx.x / kParts * 4;
  const int present = columns.columns - column;  // of this thread's columns
  const auto place = [&](std::byte* block, int key) {
    return reinterpret_cast<float*>(block) + key * p.states.tile + columns.in_block + column;
  };
  const auto has = [&](int key) { return present > 0 && (kWhole || key < p.shape.key_dim); };

  State s;
  std::byte* const before = from < 0 ? nullptr : BlockAt(p, from, columns.block);
  s.ForEach(part, [&](int key, float4& at) {
    at =
        before != nullptr && has(key) ? LoadColumns<kWhole>(place(before, key), present) : float4{};
  });
  WaitForPrevious();
  CopyRows(p, columns, begin, min(kStageRows, count), stages[0]);
  asm volatile("cp.async.commit_group;" ::: "memory");
  float* const out =
      p.mixed + 2 * p.shape.key_size() + columns.head * p.shape.value_dim + columns.column + column;
  const auto store = [&](int row, float y) {
    if (part < 4 && ColumnOfSum(part) < present) {
      out[int64_t{begin + row} * p.shape.qkv_size() + ColumnOfSum(part)] = y;
    }
  };
  float4 outputs = {};  // of the row before, by parts: added up beside the next row's work
  for (int first = 0, stage = 0; first < count; first += kStageRows, stage ^= 1) {
    const int next = first + kStageRows;
    if (next < count) {
      CopyRows(p, columns, begin + next, min(kStageRows, count - next), stages[stage ^ 1]);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
    const int rows = min(kStageRows, count - first);
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      const RowPart row(stages[stage][r], part, column);
      const float4 seen = Seen(s, row);
      const float y = SumPartsOfOne(outputs, part);
      if (first + r > 0) store(first + r - 1, y);
      outputs = Update(s, row, seen);
    }
    __syncthreads();
  }
  store(count - 1, SumPartsOfOne(outputs, part));
  std::byte* const after = BlockAt(p, to, columns.block);
  s.ForEach(part, [&](int key, const float4& at) {
    if (has(key)) StoreColumns<kWhole>(place(after, key), present, at);
  });
}

}  // namespace
}  // namespace delta

cudaError_t DeltaRule(const DeltaParams& params, cudaStream_t stream) {
  using namespace delta;
  if (!IsValid(params)) return cudaErrorInvalidValue;
  const int tiles = params.shape.value_heads * (params.shape.value_dim / params.states.tile);
  const int parts = (params.states.tile + kColumns - 1) / kColumns;
  const bool whole = params.shape.key_dim == kMostKeys && params.states.tile % 4 == 0;
  if (params.single_rows && whole && params.states.tile <= kColumns) {
    return params.isa == KernelIsa::kSm90 ? LaunchDeltaStep<Sm90Isa>(params, stream)
                                          : LaunchDeltaStep<MmaIsa<4>>(params, stream);
  }
  const dim3 grid(tiles * parts, params.rows.states.sequences);
  const auto kernel = whole ? RuleKernel<true> : RuleKernel<false>;
  if (params.single_rows) return LaunchEarly(kernel, grid, kThreads, 0, stream, params, parts);
  // Of long runs each block wants a multiprocessor for itself. An early launch would crowd the
  // blocks onto those that the kernel before leaves first.
  kernel<<<grid, kThreads, 0, stream>>>(params, parts);
  return cudaGetLastError();
}

}  // namespace dorad::kernels
