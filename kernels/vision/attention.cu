#include "kernels/common/host.h"
#include "kernels/vision/attention.h"
#include "kernels/vision/attention_launch.h"

namespace dorad::kernels {

cudaError_t SegmentAttention(const SegmentAttentionParams& params, cudaStream_t stream) {
  if (params.rows <= 0 || params.heads <= 0 || params.heads > 21845 ||
      !HasSegmentAttention(params.head_dim) || params.num_tiles <= 0 ||
      params.softmax_scale <= 0.0f || !IsThere(params.qkv, 16) || !IsThere(params.tiles, 4) ||
      !IsThere(params.out, 4)) {
    return cudaErrorInvalidValue;
  }
  return params.isa == KernelIsa::kSm90 ? LaunchSegmentAttention<Sm90Heads>(params, stream)
                                        : LaunchSegmentAttention<MmaHeads>(params, stream);
}

}  // namespace dorad::kernels
