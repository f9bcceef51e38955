#include <cuda.h>

#include "kernels/isa/sm90/attention.cuh"
#include "kernels/isa/sm90/copy.cuh"
#include "kernels/isa/sm90/tensor_map.h"
#include "kernels/vision/attention_kernel.cuh"

namespace dorad::kernels {

// Heads by the copy engine. attention_mma.cu has the same for all other GPUs.
struct Sm90Heads : Sm90Attention {
  using Map = CUtensorMap;

  // Boxes of 64 rows and 64 columns of one head; out of bounds reads as zero.
  static cudaError_t Encode(const SegmentAttentionParams& params, Map* map) {
    const auto dim = static_cast<cuuint64_t>(params.head_dim);
    const auto heads = static_cast<cuuint64_t>(3 * params.heads);
    return EncodeTensor<3>(
        params.qkv,
        {{dim, heads, static_cast<cuuint64_t>(params.rows)}, {dim, dim * heads}, {64, 1, 64}}, map);
  }

  // 64 rows of one head, in blocks of 64 columns. One thread.
  template <int kBlocks>
  __device__ static void FetchHead(const Map& map, uint32_t destination, int head, int row,
                                   uint32_t barrier) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      CopyTensorBox(destination + block * kBlockBytes, &map, 64 * block, head, row, barrier);
    }
  }
};

template cudaError_t LaunchSegmentAttention<Sm90Heads>(const SegmentAttentionParams& params,
                                                       cudaStream_t stream);

}  // namespace dorad::kernels
