#include <cuda.h>

#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/dora/linear.h"
#include "kernels/dora/linear_launch.h"
#include "kernels/dora/linear_plan.h"

namespace dorad::kernels {
namespace {

constexpr size_t kAlignment = 256;

size_t Aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Columns of the batch that a kernel was built for.
int BatchColumns(int rows) {
  int columns = 8;
  while (columns < rows) columns *= 2;
  return columns;
}

struct Workspace {
  size_t h;  // offsets
  size_t h_partial;
  size_t y_partial;
  size_t bytes;
};

Workspace LayOut(const DoraLinearShape& shape, const LinearPlan& plan, int rows, int max_rank) {
  const size_t h_elements =
      size_t{1} * shape.parts * rows * static_cast<size_t>((max_rank + 7) / 8 * 8);
  Workspace w;
  w.h = kDoraLinearCounterBytes;
  w.h_partial = w.h + Aligned(h_elements * sizeof(__nv_bfloat16));
  w.y_partial = w.h_partial + Aligned(h_elements * plan.a_splits * sizeof(float));
  w.bytes = w.y_partial;
  if (plan.splits > 1) {
    w.bytes +=
        Aligned(size_t{1} * plan.Tiles() * plan.PanelRows() * BatchColumns(rows) * sizeof(float));
  }
  return w;
}

bool Valid(const DoraLinearShape& shape, int rows, int max_rank) {
  if (rows < 1 || rows > kDoraLinearMaxRows || max_rank < 0 || max_rank > INT16_MAX - 7) {
    return false;
  }
  if (shape.in < 8 || shape.in % 8 != 0) return false;
  if (shape.parts < 1 || shape.parts > kDoraLinearMaxParts) return false;
  for (int p = 0; p < shape.parts; ++p) {
    if (shape.out[p] < 1 || (p + 1 < shape.parts && shape.out[p] % 16 != 0)) return false;
  }
  return true;
}

bool IsAligned(const void* pointer, size_t alignment) {
  return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

cudaError_t Processors(int* count) {
  int device = 0;
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

// [rows, columns] of bf16 with a leading dimension, fetched in boxes of [box_rows, kLinearStageK]
// into the 128-byte swizzle.
cudaError_t MakeMap(const __nv_bfloat16* data, int rows, int columns, int ld, int box_rows,
                    CUtensorMap* map) {
  void* symbol = nullptr;
  cudaDriverEntryPointQueryResult found;
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol,
                                                              12000, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(ld) * sizeof(__nv_bfloat16)};
  const cuuint32_t box[] = {kLinearStageK, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(symbol)(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<__nv_bfloat16*>(data), sizes, strides,
      box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

size_t DoraLinearWorkspaceBytes(const DoraLinearShape& shape, int rows, int max_rank) {
  int processors = 0;
  if (!Valid(shape, rows, max_rank) || Processors(&processors) != cudaSuccess) return 0;
  return LayOut(shape, PlanLinear(shape, processors, BatchColumns(rows)), rows, max_rank).bytes;
}

cudaError_t EncodeDoraMaps(const DoraFactors& factors, int in, int out, CUtensorMap maps[2]) {
  maps[0] = maps[1] = CUtensorMap{};
  if (factors.rank == 0) return cudaSuccess;
  DORAD_CUDA_RETURN_IF_ERROR(MakeMap(factors.a, factors.rank, in, in, kLinearBoxRows, &maps[0]));
  return MakeMap(factors.b, out, (factors.rank + 7) / 8 * 8, factors.ldb, kLinearBoxRows, &maps[1]);
}

cudaError_t DoraLinear(const DoraLinearParams& params, cudaStream_t stream) {
  const DoraLinearShape& shape = params.shape;
  if (!Valid(shape, params.rows, params.max_rank) || !IsAligned(params.x, 16) ||
      !IsAligned(params.w, 16) || !IsAligned(params.workspace, kAlignment) || params.y == nullptr ||
      params.segments == nullptr || params.num_segments == nullptr ||
      (params.max_rank > 0 && !IsAligned(params.maps, 64))) {
    return cudaErrorInvalidValue;
  }
  int processors = 0;
  DORAD_CUDA_RETURN_IF_ERROR(Processors(&processors));
  LinearArgs args = {};
  args.p = params;
  const int columns = BatchColumns(params.rows);
  args.plan = PlanLinear(shape, processors, columns);
  const Workspace workspace = LayOut(shape, args.plan, params.rows, params.max_rank);
  if (params.workspace_bytes < workspace.bytes) return cudaErrorInvalidValue;
  args.part_begin[0] = 0;
  for (int p = 0; p < kDoraLinearMaxParts; ++p) {
    args.part_begin[p + 1] = args.part_begin[p] + (p < shape.parts ? shape.out[p] : 0);
  }
  args.ldh = (params.max_rank + 7) / 8 * 8;
  auto* base = static_cast<uint8_t*>(params.workspace);
  args.counters = reinterpret_cast<LinearCounters*>(base);
  args.h = reinterpret_cast<__nv_bfloat16*>(base + workspace.h);
  args.h_partial = reinterpret_cast<float*>(base + workspace.h_partial);
  args.y_partial = reinterpret_cast<float4*>(base + workspace.y_partial);

  CUtensorMap w_map;
  CUtensorMap x_map;
  DORAD_CUDA_RETURN_IF_ERROR(
      MakeMap(params.w, OutFeatures(shape), shape.in, shape.in, args.plan.PanelRows(), &w_map));
  DORAD_CUDA_RETURN_IF_ERROR(MakeMap(params.x, params.rows, shape.in, shape.in, columns, &x_map));
  const LinearLaunch launch = {w_map, x_map, args, processors, stream};
  switch (columns) {
    case 8:
      return LaunchLinear<8>(launch);
    case 16:
      return LaunchLinear<16>(launch);
    case 32:
      return LaunchLinear<32>(launch);
    case 64:
      return LaunchLinear<64>(launch);
    case 128:
      return LaunchLinear<128>(launch);
    default:
      return LaunchLinear<256>(launch);
  }
}

}  // namespace dorad::kernels
