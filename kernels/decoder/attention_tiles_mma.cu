#include "kernels/decoder/attention_mma.cuh"
#include "kernels/decoder/attention_tiles_kernel.cuh"

namespace dorad::kernels {

template cudaError_t LaunchTileAttention<MmaPages>(const AttentionLaunch& launch,
                                                   cudaStream_t stream);

}  // namespace dorad::kernels
