#include "kernels/decoder/attention_mma.cuh"
#include "kernels/decoder/attention_rows_kernel.cuh"

namespace dorad::kernels {

template cudaError_t RowBlocks<MmaPages>(const AttentionShape& shape, bool shares, bool is_fp8,
                                         int32_t* blocks);
template cudaError_t LaunchRowAttention<MmaPages>(const AttentionLaunch& launch,
                                                  cudaStream_t stream);

}  // namespace dorad::kernels
