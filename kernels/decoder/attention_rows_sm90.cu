#include "kernels/decoder/attention_rows_kernel.cuh"
#include "kernels/decoder/attention_sm90.cuh"

namespace dorad::kernels {

template cudaError_t RowBlocks<Sm90Pages>(const AttentionShape& shape, bool shares, bool is_fp8,
                                          int32_t* blocks);
template cudaError_t LaunchRowAttention<Sm90Pages>(const AttentionLaunch& launch,
                                                   cudaStream_t stream);

}  // namespace dorad::kernels
