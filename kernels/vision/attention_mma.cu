#include "kernels/vision/attention_mma.cuh"

namespace dorad::kernels {

template cudaError_t LaunchSegmentAttention<MmaHeads>(const SegmentAttentionParams& params,
                                                      cudaStream_t stream);

}  // namespace dorad::kernels
