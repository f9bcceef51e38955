// The kernel behind SegmentAttention, by instruction set.
#pragma once

#include "kernels/vision/attention.h"

namespace dorad::kernels {

struct Sm90Heads;
struct MmaHeads;

template <typename Isa>
cudaError_t LaunchSegmentAttention(const SegmentAttentionParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
