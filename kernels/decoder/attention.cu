#include "kernels/common/status.h"
#include "kernels/decoder/attention.h"
#include "kernels/decoder/attention_layout.h"
#include "kernels/decoder/attention_simple.h"

namespace dorad::kernels {
namespace {

bool IsValid(const AttentionShape& shape, const StepRows& rows) {
  return rows.rows > 0 && shape.kv_heads > 0 && shape.heads > 0 &&
         shape.heads % shape.kv_heads == 0 && shape.head_dim > 0 && shape.head_dim % 2 == 0 &&
         shape.head_dim <= 256;
}

cudaError_t LaunchRows(const AttentionLaunch& launch, cudaStream_t stream) {
  return launch.params.isa == KernelIsa::kSm90 ? LaunchRowAttention<Sm90Pages>(launch, stream)
                                               : LaunchRowAttention<MmaPages>(launch, stream);
}

}  // namespace

bool HasFp8Attention(const AttentionShape& shape, int32_t width) {
  RopeAppendParams turn;
  turn.shape = shape;
  turn.width = width;
  return IsFastAttention(shape) && HasTileAttention(shape.head_dim) &&
         (!IsPartial(turn) || TurnsByPairs(turn));
}

cudaError_t AttentionBlocks(const AttentionShape& shape, KernelIsa isa, bool shares, bool is_fp8,
                            int32_t* blocks) {
  return isa == KernelIsa::kSm90 ? RowBlocks<Sm90Pages>(shape, shares, is_fp8, blocks)
                                 : RowBlocks<MmaPages>(shape, shares, is_fp8, blocks);
}

cudaError_t LeastSharedPositions(const AttentionShape& shape, KernelIsa isa, int64_t* positions) {
  constexpr int64_t kBlockPositions = 1024;  // of a block
  *positions = INT64_MAX;
  if (!IsFastAttention(shape) || AttentionSharedRows(shape) == 1) return cudaSuccess;
  int32_t blocks;
  DORAD_CUDA_RETURN_IF_ERROR(
      AttentionBlocks(shape, isa, /*shares=*/false, /*is_fp8=*/false, &blocks));
  *positions = kBlockPositions * blocks / shape.kv_heads;
  return cudaSuccess;
}

cudaError_t PagedAttention(const PagedAttentionParams& params, cudaStream_t stream) {
  if (!IsValid(params.shape, params.rows)) return cudaErrorInvalidValue;
  if (params.cache.factors != nullptr &&
      (params.workspace.data == nullptr || !HasFp8Attention(params.shape, params.shape.head_dim))) {
    return cudaErrorInvalidValue;
  }
  if (params.workspace.data == nullptr || !IsFastAttention(params.shape)) {
    return SimplePagedAttention(params, stream);
  }
  AttentionLaunch launch{params, {}};
  if (!LayOutAttention(params.shape, params.rows.rows, params.workspace, &launch.layout)) {
    return cudaErrorInvalidValue;
  }
  if (params.row_tiles && HasTileAttention(params.shape.head_dim)) {
    DORAD_CUDA_RETURN_IF_ERROR(params.isa == KernelIsa::kSm90
                                   ? LaunchTileAttention<Sm90Pages>(launch, stream)
                                   : LaunchTileAttention<MmaPages>(launch, stream));
  }
  return LaunchRows(launch, stream);
}

cudaError_t AppendAttention(const RopeAppendParams& append, const PagedAttentionParams& attention,
                            cudaStream_t stream) {
  const bool turns =
      !IsPartial(append) || (AppendsParts(attention.shape.head_dim) && TurnsByPairs(append));
  if (attention.workspace.data == nullptr || !IsFastAttention(attention.shape) || !turns) {
    DORAD_CUDA_RETURN_IF_ERROR(RopeAppend(append, stream));
    return PagedAttention(attention, stream);
  }
  if (!IsValid(attention.shape, attention.rows) || attention.row_tiles || append.qkv == nullptr ||
      attention.rows.reach != nullptr) {
    return cudaErrorInvalidValue;
  }
  AttentionLaunch launch{attention, {}, &append};
  if (!LayOutAttention(attention.shape, attention.rows.rows, attention.workspace, &launch.layout)) {
    return cudaErrorInvalidValue;
  }
  return LaunchRows(launch, stream);
}

}  // namespace dorad::kernels
