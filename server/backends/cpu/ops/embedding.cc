#include "server/backends/cpu/ops/embedding.h"

#include <ATen/ATen.h>

#include "server/backends/cpu/simd/kernels.h"
#include "server/backends/cpu/simd/parallel.h"
#include "server/backends/cpu/simd/scratch.h"
#include "server/platform/check.h"

namespace dorad::ops {
namespace {

bool IsStored(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16;
}

void CheckArguments(const at::Tensor& ids, const at::Tensor& weight,
                    absl::Span<const RowSegment> segments) {
  DORAD_CHECK(ids.scalar_type() == at::kInt && ids.dim() == 1 && ids.is_contiguous());
  DORAD_CHECK(IsStored(weight) && weight.dim() == 2 && weight.is_contiguous());
  const int64_t vocabulary = weight.size(0);
  const int64_t dim = weight.size(1);
  int64_t next = 0;
  for (const RowSegment& s : segments) {
    DORAD_CHECK(s.begin == next && s.end >= s.begin);
    next = s.end;
    if (s.factors == nullptr) continue;
    const at::Tensor& a = s.factors->a_RI;  // [V, R] here
    const at::Tensor& b = s.factors->b_OR;
    DORAD_CHECK(IsStored(a) && a.scalar_type() == b.scalar_type());
    DORAD_CHECK(a.dim() == 2 && a.size(0) == vocabulary && a.is_contiguous());
    DORAD_CHECK(b.dim() == 2 && b.size(0) == dim && b.size(1) == a.size(1) && b.is_contiguous());
    const at::Tensor& g = s.factors->g_O;
    DORAD_CHECK(!g.defined() || (g.scalar_type() == at::kFloat && g.dim() == 1 &&
                                 g.size(0) == dim && g.is_contiguous()));
  }
  DORAD_CHECK(next == ids.size(0));
}

// y = s·B·(A's row), as the extension of a product over nothing.
void LowRank(const cpu::Kernels& kernels, const AdapterFactors& f, int64_t id, float* y) {
  static thread_local cpu::Scratch scratch;
  const int64_t dim = f.b_OR.size(0);
  const int64_t rank = f.b_OR.size(1);
  const int64_t chunk = 2 * kernels.lanes;
  const int64_t padded = (rank + chunk - 1) / chunk * chunk;
  float* row = reinterpret_cast<float*>(scratch.Get(static_cast<size_t>(2 * padded) * 4));
  char* h = reinterpret_cast<char*>(row + padded);
  cpu::Format format = cpu::Format::kF32;
  if (f.a_RI.scalar_type() == at::kBFloat16) {
    format = cpu::Format::kBf16;
    const at::BFloat16* a = f.a_RI.const_data_ptr<at::BFloat16>() + id * rank;
    for (int64_t r = 0; r < rank; ++r) row[r] = static_cast<float>(a[r]);
  } else {
    const float* a = f.a_RI.const_data_ptr<float>() + id * rank;
    std::copy(a, a + rank, row);
  }
  kernels.pack(row, rank, f.scale, /*round_bf16=*/false, format, h, chunk * 4);
  cpu::GemmTile tile;
  tile.rows = 1;
  tile.extended = tile.shared = true;
  tile.b[0] = {f.b_OR.const_data_ptr(), rank, format};
  tile.h = h;
  tile.y = y;
  tile.y_step = dim;
  kernels.gemm({nullptr, 0, cpu::Format::kF32}, 0, dim, nullptr, tile);
}

}  // namespace

at::Tensor Embed(const at::Tensor& token_ids_T, const at::Tensor& weight_VD, float factor,
                 absl::Span<const RowSegment> segments) {
  CheckArguments(token_ids_T, weight_VD, segments);
  const cpu::Kernels& kernels = cpu::ActiveKernels();
  const int32_t* ids = token_ids_T.const_data_ptr<int32_t>();
  const int64_t vocabulary = weight_VD.size(0);
  const int64_t dim = weight_VD.size(1);
  const bool bf16 = weight_VD.scalar_type() == at::kBFloat16;
  const char* weight = static_cast<const char*>(weight_VD.const_data_ptr());
  at::Tensor y_TD = at::zeros({token_ids_T.size(0), dim}, at::kFloat);
  float* y = y_TD.mutable_data_ptr<float>();
  for (const RowSegment& s : segments) {
    const AdapterFactors* f = s.factors;
    const float* g = f != nullptr && f->g_O.defined() ? f->g_O.const_data_ptr<float>() : nullptr;
    const int64_t cost = dim * (f == nullptr ? 1 : 1 + f->b_OR.size(1));
    cpu::ForRows(s.end - s.begin, cost, [&](int64_t begin, int64_t end) {
      for (int64_t r = s.begin + begin; r < s.begin + end; ++r) {
        const int64_t id = ids[r];
        DORAD_CHECK(id >= 0 && id < vocabulary);
        float* row = y + r * dim;
        if (f != nullptr) LowRank(kernels, *f, id, row);
        kernels.embed_row(weight + id * dim * (bf16 ? 2 : 4), bf16, g, dim, row);
        if (factor != 1.0f) kernels.scale(row, dim, factor, row);
      }
    });
  }
  return y_TD;
}

}  // namespace dorad::ops
