// Common parts of the delta-nets' kernels: where a state lies, and the checks of a launch.
#pragma once

#include "kernels/common/host.h"
#include "kernels/common/warp.cuh"
#include "kernels/decoder/delta.h"
#include "kernels/isa/launch.h"

namespace dorad::kernels {

inline constexpr int kMostKeys = 128;  // of a state's column, in registers
inline constexpr int kMostTaps = 4;    // of the convolution, in registers

// Block i of a net's state, whose pages begin at pages[first].
__device__ inline std::byte* BlockAt(const DeltaParams& p, int first, int i) {
  const int index = p.states.first_block + i;
  const int64_t place = p.rows.pages[first + index % p.states.pages];
  return p.states.memory + index / p.states.pages * p.states.plane_bytes +
         place * p.states.block_bytes;
}

// Channels [c, c + 4) of the convolution's row j, 0 the oldest. c is a multiple of 4, and so is a
// block's size: one block has all four.
__device__ inline __nv_bfloat16* ConvolutionAt(const DeltaParams& p, int first, int j, int c) {
  const int in_block = p.states.block_bytes / static_cast<int>(sizeof(__nv_bfloat16));
  const int at = j * p.shape.qkv_size() + c;
  std::byte* const block = BlockAt(p, first, p.states.state_blocks + at / in_block);
  return reinterpret_cast<__nv_bfloat16*>(block) + at % in_block;
}

inline bool IsValid(const DeltaParams& p) {
  const DeltaStates& states = p.states;
  return IsDeltaShape(p.shape) && p.rows.rows > 0 && p.rows.states.sequences > 0 &&
         p.rows.states.sequences <= 65535 && p.rows.states.to != nullptr && states.pages > 0 &&
         states.tile > 0 && p.shape.value_dim % states.tile == 0 &&
         int64_t{4} * p.shape.key_dim * states.tile <= states.block_bytes &&
         states.block_bytes % 16 == 0 && IsThere(p.qkvz, 16) && IsThere(p.mixed, 16) &&
         IsThere(p.norm, 16) && IsThere(p.out, 16);
}

}  // namespace dorad::kernels
