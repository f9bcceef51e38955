// All linears of one decode step of Qwen3-8B (36 layers and the head) in a CUDA graph, with 0 to 8
// adapters of rank 384 on all seven modules, against the time that their bytes take at the copy
// bandwidth of the same run. Usage: kernels_linear_bench [parts] [mma] [rows ...]; with `parts`,
// each projection alone too; with `mma`, by the instructions that all GPUs have.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels/dora/linear.h"

namespace dorad::kernels {
namespace {

#define CHECK_CUDA(expression)                                                              \
  do {                                                                                      \
    if (const cudaError_t status_ = (expression); status_ != cudaSuccess) {                 \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status_)); \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (false)

constexpr int kLayers = 36;
constexpr int kRank = 384;
constexpr int kAdapters = 8;
constexpr int kModules = 7 * kLayers;
constexpr int kVocabulary = 151936;

struct Projection {
  const char* name;
  DoraLinearShape shape;
  int first_module;  // of a layer's seven
};
const Projection kProjections[] = {{"qkv", {4096, 3, {4096, 1024, 1024}}, 0},
                                   {"o", {4096, 1, {4096}}, 3},
                                   {"gate_up", {4096, 2, {12288, 12288}}, 4},
                                   {"down", {12288, 1, {4096}}, 6}};
const DoraLinearShape kHead = {4096, 1, {kVocabulary}};

int Out(const DoraLinearShape& shape) { return shape.out[0] + shape.out[1] + shape.out[2]; }

template <typename T>
T* Allocate(size_t size) {
  void* data = nullptr;
  CHECK_CUDA(cudaMalloc(&data, size * sizeof(T)));
  return static_cast<T*>(data);
}

// Random numbers in memory of their own; the same few million over and over.
class Noise {
 public:
  Noise() {
    std::vector<__nv_bfloat16> values(kSize);
    uint32_t state = 12345;
    for (__nv_bfloat16& value : values) {
      float sum = 0.0f;
      for (int i = 0; i < 4; ++i) {
        state = state * 1664525 + 1013904223;
        sum += static_cast<float>(state >> 8) / (1 << 24) - 0.5f;
      }
      value = __float2bfloat16(0.05f * sum);
    }
    source_ = Allocate<__nv_bfloat16>(kSize);
    CHECK_CUDA(cudaMemcpy(source_, values.data(), kSize * 2, cudaMemcpyHostToDevice));
  }
  __nv_bfloat16* Make(size_t size) {
    auto* data = Allocate<__nv_bfloat16>(size);
    for (size_t begin = 0; begin < size; begin += kSize) {
      CHECK_CUDA(cudaMemcpyAsync(data + begin, source_, std::min(kSize, size - begin) * 2,
                                 cudaMemcpyDeviceToDevice));
    }
    return data;
  }

 private:
  static constexpr size_t kSize = (1 << 23) + 24;
  __nv_bfloat16* source_ = nullptr;
};

template <typename T>
T* Upload(const std::vector<T>& values) {
  T* data = Allocate<T>(values.size());
  CHECK_CUDA(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return data;
}

template <typename F>
double MedianMs(cudaStream_t stream, int repeats, F launch) {
  cudaEvent_t start, stop;
  CHECK_CUDA(cudaEventCreate(&start));
  CHECK_CUDA(cudaEventCreate(&stop));
  std::vector<float> times(repeats);
  for (int i = -3; i < repeats; ++i) {
    CHECK_CUDA(cudaEventRecord(start, stream));
    launch();
    CHECK_CUDA(cudaEventRecord(stop, stream));
    CHECK_CUDA(cudaEventSynchronize(stop));
    if (i >= 0) CHECK_CUDA(cudaEventElapsedTime(&times[i], start, stop));
  }
  std::sort(times.begin(), times.end());
  return times[repeats / 2];
}

double CopyBandwidth(cudaStream_t stream) {
  constexpr size_t kBytes = size_t{4} << 30;
  void* source = nullptr;
  void* target = nullptr;
  CHECK_CUDA(cudaMalloc(&source, kBytes));
  CHECK_CUDA(cudaMalloc(&target, kBytes));
  CHECK_CUDA(cudaMemset(source, 0x3C, kBytes));
  const double ms = MedianMs(stream, 9, [&] {
    CHECK_CUDA(cudaMemcpyAsync(target, source, kBytes, cudaMemcpyDeviceToDevice, stream));
  });
  cudaFree(source);
  cudaFree(target);
  return 2.0 * kBytes / (ms * 1e-3);
}

class Model {
 public:
  explicit Model(KernelIsa isa) : isa_(isa) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (const Projection& projection : kProjections) {
        w_.push_back(noise_.Make(size_t{1} * Out(projection.shape) * projection.shape.in));
      }
    }
    head_ = noise_.Make(size_t{kVocabulary} * 4096);
    std::vector<DoraFactors> table;
    std::vector<CUtensorMap> maps;
    for (int slot = 0; slot < kAdapters; ++slot) {
      for (int layer = 0; layer < kLayers; ++layer) {
        for (const Projection& projection : kProjections) {
          for (int p = 0; p < projection.shape.parts; ++p) {
            DoraFactors factors;
            factors.a = noise_.Make(size_t{kRank} * projection.shape.in);
            factors.b = noise_.Make(size_t{kRank} * projection.shape.out[p]);
            factors.g = Upload(std::vector<float>(projection.shape.out[p], 1.01f));
            factors.scale = 1.0f;
            factors.rank = factors.ldb = kRank;
            table.push_back(factors);
            maps.resize(2 * table.size());
            if (isa != KernelIsa::kSm90) continue;
            CHECK_CUDA(EncodeDoraMaps(factors, projection.shape.in, projection.shape.out[p],
                                      &maps[maps.size() - 2]));
          }
        }
      }
    }
    table_ = Upload(table);
    maps_ = Upload(maps);
    x_ = noise_.Make(size_t{kDoraLinearMaxRows} * 12288);
    CHECK_CUDA(cudaMalloc(&y_, sizeof(float) * kDoraLinearMaxRows * kVocabulary));
    for (const Projection& projection : kProjections) {
      workspace_bytes_ = std::max(
          workspace_bytes_, DoraLinearWorkspaceBytes(projection.shape, kDoraLinearMaxRows, kRank));
    }
    CHECK_CUDA(cudaMalloc(&workspace_, workspace_bytes_));
    CHECK_CUDA(cudaMemset(workspace_, 0, kDoraLinearSignalBytes));
    segments_ = Allocate<RowSegment>(kDoraLinearMaxRows);
    num_segments_ = Allocate<int32_t>(1);
  }

  // Rows dealt evenly to the adapters; 0: base rows.
  void SetAdapters(int rows, int adapters) {
    std::vector<RowSegment> segments;
    const int count = std::max(1, std::min(adapters, rows));
    max_rank_ = adapters == 0 ? 0 : kRank;
    for (int i = 0; i < count; ++i) {
      segments.push_back({adapters == 0 ? -1 : i, rows * i / count, rows * (i + 1) / count});
    }
    CHECK_CUDA(cudaMemcpy(segments_, segments.data(), segments.size() * sizeof(RowSegment),
                          cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(num_segments_, &count, sizeof(count), cudaMemcpyHostToDevice));
  }

  void Launch(int layer, int projection, int rows, cudaStream_t stream) const {
    DoraLinearParams params = Common(rows);
    params.shape = kProjections[projection].shape;
    params.w = w_[layer * 4 + projection];
    params.first_module = layer * 7 + kProjections[projection].first_module;
    CHECK_CUDA(DoraLinear(params, stream));
  }

  void LaunchHead(int rows, cudaStream_t stream) const {
    DoraLinearParams params = Common(rows);
    params.shape = kHead;
    params.w = head_;
    params.max_rank = 0;
    params.y_fp32 = true;
    params.table = {zero_factors_, 0};
    CHECK_CUDA(DoraLinear(params, stream));
  }

 private:
  DoraLinearParams Common(int rows) const {
    DoraLinearParams params;
    params.rows = rows;
    params.isa = isa_;
    params.max_rank = max_rank_;
    params.x = x_;
    params.table = {table_, kModules};
    params.maps = maps_;
    params.segments = segments_;
    params.num_segments = num_segments_;
    params.y = y_;
    params.workspace = workspace_;
    params.workspace_bytes = workspace_bytes_;
    return params;
  }

  const KernelIsa isa_;
  Noise noise_;
  std::vector<__nv_bfloat16*> w_;
  __nv_bfloat16* head_ = nullptr;
  __nv_bfloat16* x_ = nullptr;
  DoraFactors* table_ = nullptr;
  CUtensorMap* maps_ = nullptr;
  // The head is not adapted: every slot's factors are this one's.
  DoraFactors* zero_factors_ = Upload(std::vector<DoraFactors>(1));
  void* y_ = nullptr;
  int max_rank_ = 0;
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
  RowSegment* segments_ = nullptr;
  int32_t* num_segments_ = nullptr;
};

// Weights, the factors of distinct adapters, results.
double Bytes(const DoraLinearShape& shape, int rows, int adapters) {
  const double out = Out(shape);
  return 2.0 * out * shape.in + 2.0 * rows * (shape.in + out) +
         2.0 * adapters * kRank * (double{1} * shape.parts * shape.in + out);
}

template <typename F>
double GraphMs(cudaStream_t stream, F launch) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  launch();
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  const double ms = MedianMs(stream, 15, [&] { CHECK_CUDA(cudaGraphLaunch(exec, stream)); });
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  return ms;
}

int Main(int argc, char** argv) {
  bool parts = false;
  KernelIsa isa = BestIsa();
  std::vector<int> row_counts;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "parts") == 0) {
      parts = true;
    } else if (std::strcmp(argv[i], "mma") == 0) {
      isa = KernelIsa::kMma;
    } else {
      row_counts.push_back(std::atoi(argv[i]));
    }
  }
  if (row_counts.empty()) row_counts = {1, 8, 32, 64, 128, 256};
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  const double bandwidth = CopyBandwidth(stream);
  std::printf("copy %.0f GB/s\n", bandwidth * 1e-9);
  Model model(isa);
  CHECK_CUDA(cudaDeviceSynchronize());
  for (const int rows : row_counts) {
    for (const int adapters : {0, 1, 4, 8}) {
      const int distinct = std::min(adapters, rows);
      if (distinct < adapters) continue;
      model.SetAdapters(rows, adapters);
      double bytes = Bytes(kHead, rows, 0) + 2.0 * rows * kVocabulary;
      for (const Projection& projection : kProjections) {
        bytes += kLayers * Bytes(projection.shape, rows, distinct);
      }
      const double floor = bytes / bandwidth * 1e3;
      const double ms = GraphMs(stream, [&] {
        for (int layer = 0; layer < kLayers; ++layer) {
          for (int i = 0; i < 4; ++i) model.Launch(layer, i, rows, stream);
        }
        model.LaunchHead(rows, stream);
      });
      std::printf("rows %3d adapters %d: %7.3f ms, floor %6.3f, ratio %.2f", rows, adapters, ms,
                  floor, floor / ms);
      if (parts) {
        for (int i = 0; i < 4; ++i) {
          const double part_ms = GraphMs(stream, [&] {
            for (int layer = 0; layer < kLayers; ++layer) model.Launch(layer, i, rows, stream);
          });
          std::printf(" | %s %.1f us (%.1f)", kProjections[i].name, part_ms * 1e3 / kLayers,
                      Bytes(kProjections[i].shape, rows, distinct) / bandwidth * 1e6);
        }
        const double head_ms = GraphMs(stream, [&] {
          for (int i = 0; i < 4; ++i) model.LaunchHead(rows, stream);
        });
        std::printf(" | head %.1f us (%.1f)", head_ms * 1e3 / 4,
                    (Bytes(kHead, rows, 0) + 2.0 * rows * kVocabulary) / bandwidth * 1e6);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace dorad::kernels

int main(int argc, char** argv) { return dorad::kernels::Main(argc, argv); }
