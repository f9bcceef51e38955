// All kernels for the instruction set this translation unit is compiled for, as one table named
// kTable. Included once by each variant_*.cc.
#pragma once

#include "server/backends/cpu/simd/attend.h"
#include "server/backends/cpu/simd/gemm.h"
#include "server/backends/cpu/simd/kernels.h"
#include "server/backends/cpu/simd/logits_kernels.h"
#include "server/backends/cpu/simd/pointwise.h"

namespace dorad::ops::cpu::DORAD_SIMD {

#define DORAD_STRING_(x) #x
#define DORAD_STRING(x) DORAD_STRING_(x)

extern const Kernels kTable;
// NOLINTNEXTLINE(misc-definitions-in-headers): each variant is one file that includes this
const Kernels kTable = {
    .name = DORAD_STRING(DORAD_SIMD),
    .lanes = kLanes,
#if defined(__AVX512BF16__)
    .bf16_dot = true,
#else
    .bf16_dot = false,
#endif
    .tile_rows = kTileRows,
    .queries = kQueries,
    .pack = Pack,
    .gemm = Gemm,
    .fma_peak = FmaPeak,
    .rms_norm = RmsNormRow,
    .add = Add,
    .silu_mul = SiluMul,
    .gelu_tanh_mul = GeluTanhMul,
    .embed_row = EmbedRow,
    .rotate = Rotate,
    .to_bf16 = ToBf16,
    .attend = Attend,
    .merge = Merge,
    .scale = Scale,
    .divide = Divide,
    .group_max = GroupMax,
    .sum_exp = SumExp,
    .philox = Philox,
    .group_bounds = GroupBounds,
};

}  // namespace dorad::ops::cpu::DORAD_SIMD
