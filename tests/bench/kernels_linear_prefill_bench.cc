// Projections of Qwen3-8B over the rows of a prefill: kernels::DoraLinearPrefill with 0, 1 and 4
// adapters of rank 384, and cuBLAS's product of the base weight alone in the same run. Graph
// replays over several sets of weights; outputs as the decoder wants them. TFLOP/s count the
// products of base and factors.
//
//   kernels_linear_prefill_bench [--isa sm90|mma] [rows ...]      default: the GPU's own, 4096
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "kernels/dora/linear.h"
#include "kernels/dora/linear_prefill.h"
#include "kernels/random/fill.h"
#include "tests/bench/kernels_timing.h"

namespace dorad::bench {
namespace {

using kernels::DoraFactors;
using kernels::DoraLinearPrefillParams;
using kernels::DoraLinearShape;
using kernels::RowSegment;

constexpr int kLayers = 36;
constexpr int kRank = 384;
constexpr int kAdapters = 4;
constexpr int kSets = 3;   // of weights and factors
constexpr int kCalls = 6;  // of one graph

struct Projection {
  const char* name;
  DoraLinearShape shape;
  bool y_fp32;
};
const Projection kProjections[] = {{"qkv", {4096, 3, {4096, 1024, 1024}}, false},
                                   {"o", {4096, 1, {4096}}, true},
                                   {"gate_up", {4096, 2, {12288, 12288}}, false},
                                   {"down", {12288, 1, {4096}}, true}};

int64_t Out(const DoraLinearShape& shape) { return shape.out[0] + shape.out[1] + shape.out[2]; }

double Flop(const DoraLinearShape& shape, double rows, bool adapted) {
  const double rank = adapted ? kRank : 0.0;
  return 2.0 * rows *
         (static_cast<double>(Out(shape)) * (shape.in + rank) + shape.parts * rank * shape.in);
}

template <typename T>
T* Allocate(int64_t size) {
  void* data = nullptr;
  Check(cudaMalloc(&data, size * sizeof(T)));
  return static_cast<T*>(data);
}

template <typename T>
T* Upload(const std::vector<T>& values) {
  T* data = Allocate<T>(static_cast<int64_t>(values.size()));
  Check(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return data;
}

__nv_bfloat16* Random(int64_t size, float limit) {
  static uint32_t seed = 1;
  auto* data = Allocate<__nv_bfloat16>(size);
  Check(kernels::FillRandom(data, size, limit, seed++, nullptr));
  return data;
}

float* Ones(int64_t size) {
  auto* data = Allocate<float>(size);
  Check(kernels::FillConstant(data, size, 1.01f, nullptr));
  return data;
}

// One projection's weights, adapters' factors and buffers.
class Work {
 public:
  Work(const Projection& projection, int rows, kernels::KernelIsa isa)
      : projection_(projection), rows_(rows), isa_(isa) {
    const DoraLinearShape& shape = projection.shape;
    std::vector<DoraFactors> table;
    std::vector<CUtensorMap> maps;
    for (int set = 0; set < kSets; ++set) w_.push_back(Random(Out(shape) * shape.in, 0.05f));
    for (int slot = 0; slot < kAdapters; ++slot) {
      for (int module = 0; module < kSets * shape.parts; ++module) {
        const int out = shape.out[module % shape.parts];
        DoraFactors factors;
        factors.a = Random(int64_t{kRank} * shape.in, 0.05f);
        factors.b = Random(int64_t{kRank} * out, 0.05f);
        factors.g = Ones(out);
        factors.scale = 1.0f;
        factors.rank = factors.ldb = kRank;
        table.push_back(factors);
        maps.resize(2 * table.size());
        Check(kernels::EncodeDoraMaps(factors, shape.in, out, &maps[maps.size() - 2]));
      }
    }
    table_ = Upload(table);
    maps_ = Upload(maps);
    x_ = Random(int64_t{rows} * shape.in, 1.0f);
    y_ = Allocate<float>(int64_t{rows} * Out(shape));
    workspace_bytes_ = kernels::DoraLinearPrefillWorkspaceBytes(shape, rows, kRank);
    workspace_ = Allocate<uint8_t>(static_cast<int64_t>(workspace_bytes_));
    Check(cudaMemset(workspace_, 0, kernels::kDoraLinearSignalBytes));
    segments_ = Allocate<RowSegment>(kAdapters);
  }

  // Rows in `adapters` segments of about one size, which end within tiles; 0: of the base.
  void SetAdapters(int adapters) {
    std::vector<RowSegment> segments;
    num_segments_ = std::max(1, adapters);
    int begin = 0;
    for (int i = 0; i < num_segments_; ++i) {
      const int end = i + 1 < num_segments_ ? rows_ * (i + 1) / num_segments_ + 5 : rows_;
      segments.push_back({adapters == 0 ? -1 : i, begin, end});
      begin = end;
    }
    Check(cudaMemcpy(segments_, segments.data(), segments.size() * sizeof(RowSegment),
                     cudaMemcpyHostToDevice));
  }

  void Launch(int call, cudaStream_t stream) const {
    const int set = call % kSets;
    DoraLinearPrefillParams params;
    params.shape = projection_.shape;
    params.rows = rows_;
    params.max_rank = kRank;
    params.x = x_;
    params.w = w_[set];
    params.table = {table_, kSets * projection_.shape.parts};
    params.maps = maps_;
    params.first_module = set * projection_.shape.parts;
    params.segments = segments_;
    params.num_segments = num_segments_;
    params.y = y_;
    params.y_fp32 = projection_.y_fp32;
    params.isa = isa_;
    params.workspace = workspace_;
    params.workspace_bytes = workspace_bytes_;
    Check(kernels::DoraLinearPrefill(params, stream));
  }

  void LaunchLibrary(int call, cublasHandle_t handle) const {
    const float one = 1.0f;
    const float zero = 0.0f;
    const int out = static_cast<int>(Out(projection_.shape));
    const int in = projection_.shape.in;
    if (cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, out, rows_, in, &one, w_[call % kSets],
                     CUDA_R_16BF, in, x_, CUDA_R_16BF, in, &zero, y_,
                     projection_.y_fp32 ? CUDA_R_32F : CUDA_R_16BF, out, CUBLAS_COMPUTE_32F,
                     CUBLAS_GEMM_DEFAULT) != CUBLAS_STATUS_SUCCESS) {
      std::fprintf(stderr, "cublasGemmEx failed\n");
      std::exit(1);
    }
  }

 private:
  const Projection& projection_;
  const int rows_;
  const kernels::KernelIsa isa_;
  std::vector<__nv_bfloat16*> w_;
  DoraFactors* table_ = nullptr;
  CUtensorMap* maps_ = nullptr;
  __nv_bfloat16* x_ = nullptr;
  float* y_ = nullptr;
  uint8_t* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
  RowSegment* segments_ = nullptr;
  int num_segments_ = 1;
};

void Run(int rows, kernels::KernelIsa isa, cudaStream_t stream, cublasHandle_t handle) {
  constexpr int kCases[] = {-1, 0, 1, 4};  // adapters; -1: cuBLAS
  double total[std::size(kCases)] = {};
  for (const Projection& projection : kProjections) {
    Work work(projection, rows, isa);
    std::printf("rows %d %-7s", rows, projection.name);
    for (size_t i = 0; i < std::size(kCases); ++i) {
      const int adapters = kCases[i];
      if (adapters >= 0) work.SetAdapters(adapters);
      const double us = MicrosecondsEach(stream, kCalls, [&](int call) {
        if (adapters < 0) {
          work.LaunchLibrary(call, handle);
        } else {
          work.Launch(call, stream);
        }
      });
      total[i] += kLayers * us * 1e-3;
      char name[32];
      std::snprintf(name, sizeof(name), adapters < 0 ? "cuBLAS" : "adapters %d", adapters);
      std::printf(" | %s %7.1f us %3.0f TFLOP/s", name, us,
                  Flop(projection.shape, rows, adapters > 0) / us * 1e-6);
      std::fflush(stdout);
    }
    std::printf("\n");
  }
  std::printf("rows %d, %d layers: cuBLAS %.2f ms, base %.2f, one adapter %.2f, four %.2f\n", rows,
              kLayers, total[0], total[1], total[2], total[3]);
}

}  // namespace
}  // namespace dorad::bench

int main(int argc, char** argv) {
  cudaStream_t stream;
  dorad::bench::Check(cudaStreamCreate(&stream));
  cublasHandle_t handle;
  if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS ||
      cublasSetStream(handle, stream) != CUBLAS_STATUS_SUCCESS) {
    std::fprintf(stderr, "cuBLAS does not start\n");
    return 1;
  }
  dorad::kernels::KernelIsa isa = dorad::kernels::BestIsa();
  std::vector<int> rows;
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--isa" && i + 1 < argc) {
      isa = dorad::bench::IsaOf(argv[++i]);
    } else {
      rows.push_back(std::atoi(argv[i]));
    }
  }
  if (rows.empty()) rows = {4096};
  for (const int count : rows) dorad::bench::Run(count, isa, stream, handle);
  return 0;
}
