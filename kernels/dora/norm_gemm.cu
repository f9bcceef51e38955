#include <algorithm>

#include "kernels/common/status.h"
#include "kernels/dora/norm_gemm.h"
#include "kernels/dora/norm_gemm_items.cuh"
#include "kernels/dora/norm_gemm_launch.h"
#include "kernels/isa/device.h"

namespace dorad::kernels::norm {
namespace {

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
        gemms[i].z_by_n != gemms[0].z_by_n || gemms[i].isa != gemms[0].isa) {
      return cudaErrorInvalidValue;
    }
  }
  int multiprocessors = 0;
  DORAD_CUDA_RETURN_IF_ERROR(Multiprocessors(&multiprocessors));
  const auto launch = gemms[0].isa == KernelIsa::kSm90 ? LaunchSm90 : LaunchMma;
  return launch(gemms, count, TileN(gemms[0]), multiprocessors, stream);
}

}  // namespace dorad::kernels::norm
