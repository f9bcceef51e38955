#include "kernels/decoder/attention_sm90.cuh"
#include "kernels/decoder/attention_tiles_kernel.cuh"

namespace dorad::kernels {

template cudaError_t LaunchTileAttention<Sm90Pages>(const AttentionLaunch& launch,
                                                    cudaStream_t stream);

}  // namespace dorad::kernels
