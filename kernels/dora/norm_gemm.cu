#include <cuda.h>

#include <algorithm>
#include <limits>

#include "kernels/common/host.h"
#include "kernels/common/status.h"
#include "kernels/dora/norm_gemm.cuh"
#include "kernels/dora/norm_gemm.h"
#include "kernels/isa/launch.h"
#include "kernels/isa/sm90/tensor_map.h"

namespace dorad::kernels::norm {
namespace {

cudaError_t Encode(const Matrix& matrix, int box_rows, CUtensorMap* map) {
  return EncodeMatrix(matrix.data, matrix.rows, matrix.columns, matrix.ld, box_rows, map);
}

int64_t TilesOf(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

int64_t ColumnsOf(const RowGemm& gemm) {
  return gemm.reduction == Reduction::kSquare ? gemm.y.columns : gemm.y.rows;
}

// Wide tiles reuse more; narrow ones for ranks where wide ones would be half empty, as 384.
int TileN(const RowGemm& gemm) {
  switch (gemm.reduction) {
    case Reduction::kSquare:
      return 256;
    case Reduction::kStore:
      return 128;
    case Reduction::kDot:
      break;
  }
  const int64_t rest = ColumnsOf(gemm) % 256;
  return rest != 0 && rest <= 128 && ColumnsOf(gemm) < 1024 ? 128 : 256;
}

constexpr int64_t kMultiprocessors = 132;  // of the GPU that splits are tuned for

template <typename C>
cudaError_t LaunchAs(const RowGemm* gemms, int count, cudaStream_t stream) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  Params params;
  params.count = count;
  int64_t items = 0;
  for (int i = 0; i < count; ++i) {
    const RowGemm& gemm = gemms[i];
    if (gemm.x.rows > kMost || ColumnsOf(gemm) > kMost || gemm.k > kMost) {
      return cudaErrorInvalidValue;
    }
    Problem& problem = params.problems[i];
    Maps& maps = params.maps[i];
    problem.partial = gemm.partial;
    problem.scale = gemm.scale;
    problem.m = static_cast<uint32_t>(gemm.x.rows);
    problem.n = static_cast<uint32_t>(ColumnsOf(gemm));
    problem.tiles_n = static_cast<uint32_t>(TilesOf(problem.n, C::tile_n));
    problem.splits = static_cast<uint32_t>(gemm.splits);
    problem.steps = static_cast<uint32_t>(TilesOf(gemm.k, kStepK));
    problem.period_steps =
        gemm.x_period == 0 ? problem.steps : static_cast<uint32_t>(gemm.x_period / kStepK);
    problem.first_item = static_cast<uint32_t>(items);
    items += TilesOf(problem.m, kTileM) * problem.tiles_n * problem.splits;
    if (items > kMost) return cudaErrorInvalidValue;
    DORAD_CUDA_RETURN_IF_ERROR(Encode(gemm.x, kTileM, &maps.x));
    DORAD_CUDA_RETURN_IF_ERROR(Encode(gemm.y, C::y_by_k ? kStepK : C::tile_n, &maps.y));
    if (C::z_boxes > 0) {
      DORAD_CUDA_RETURN_IF_ERROR(Encode(gemm.z, C::z_by_n ? 64 : kTileM, &maps.z));
    }
  }
  params.items = static_cast<uint32_t>(items);

  int multiprocessors = 0;
  DORAD_CUDA_RETURN_IF_ERROR(Multiprocessors(&multiprocessors));
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, multiprocessors));
  return LaunchEarly(RowGemmKernel<C>, blocks, kThreads, C::shared_bytes, stream, params);
}

}  // namespace

bool FitsTensorCores(const Matrix& matrix) {
  return reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0 && matrix.ld % 8 == 0;
}

int64_t Partials(const RowGemm& gemm) {
  return TilesOf(ColumnsOf(gemm), TileN(gemm)) * gemm.splits;
}

int64_t SplitsFor(const RowGemm& gemm, int64_t most) {
  const int64_t tiles = TilesOf(gemm.x.rows, kTileM) * TilesOf(ColumnsOf(gemm), TileN(gemm));
  const int64_t steps = TilesOf(gemm.k, kStepK);
  // At least four steps a part.
  most = std::max<int64_t>(1, std::min(most, steps / 4));
  // The fullest last wave, and among equals the fewest parts.
  int64_t best = 1;
  double best_fill = 0.0;
  for (int64_t splits = 1; splits <= most; ++splits) {
    const int64_t items = tiles * splits;
    const int64_t waves = TilesOf(items, kMultiprocessors);
    const double fill = static_cast<double>(items) / static_cast<double>(waves * kMultiprocessors);
    if (fill > best_fill + 0.02) {
      best = splits;
      best_fill = fill;
    }
    if (items > 8 * kMultiprocessors) break;
  }
  return best;
}

cudaError_t Launch(const RowGemm* gemms, int count, cudaStream_t stream) {
  if (count < 1 || count > kMostGemms) return cudaErrorInvalidValue;
  const Reduction reduction = gemms[0].reduction;
  for (int i = 1; i < count; ++i) {
    if (reduction != Reduction::kSquare || gemms[i].reduction != reduction ||
        gemms[i].z_by_n != gemms[0].z_by_n) {
      return cudaErrorInvalidValue;
    }
  }
  switch (reduction) {
    case Reduction::kSquare:
      return gemms[0].z_by_n
                 ? LaunchAs<Config<Reduction::kSquare, 256, /*z_by_n=*/true>>(gemms, count, stream)
                 : LaunchAs<Config<Reduction::kSquare, 256>>(gemms, count, stream);
    case Reduction::kDot:
      return TileN(gemms[0]) == 128 ? LaunchAs<Config<Reduction::kDot, 128>>(gemms, count, stream)
                                    : LaunchAs<Config<Reduction::kDot, 256>>(gemms, count, stream);
    case Reduction::kStore:
      return LaunchAs<Config<Reduction::kStore, 128>>(gemms, count, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace dorad::kernels::norm
