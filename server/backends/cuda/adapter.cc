#include "server/backends/cuda/adapter.h"

#include <atomic>
#include <cstring>
#include <utility>

#include "kernels/dora/linear.h"
#include "kernels/random/fill.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

using adapter::BaseModule;
using adapter::ModuleKind;
using kernels::DoraFactors;

constexpr char kLoading[] = "loading an adapter";

std::atomic<uint64_t> next_id{1};

}  // namespace

absl::StatusOr<std::shared_ptr<const CudaAdapterWeights>> FinishAdapter(
    const CudaModel& model, DeviceBuffer memory, int64_t image_at, std::vector<DoraFactors> modules,
    const Stream& stream) {
  const int count = model.modules().size();
  std::vector<std::byte> image(static_cast<size_t>(ImageBytes(count)));
  std::memcpy(image.data(), modules.data(), count * sizeof(DoraFactors));
  for (int id = 0; id < count; ++id) {
    const BaseModule& module = model.modules().all()[id];
    if (module.kind != ModuleKind::kLinear || model.isa() != kernels::KernelIsa::kSm90) continue;
    CUtensorMap maps[2];
    DORAD_RETURN_IF_CUDA_ERROR(kernels::EncodeDoraMaps(modules[id], static_cast<int>(module.cols),
                                                       static_cast<int>(module.rows), maps),
                               kLoading);
    std::memcpy(image.data() + ImageMapsOffset(count) + id * sizeof(maps), maps, sizeof(maps));
  }
  auto* on_device = memory.as<std::byte>(image_at);
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(on_device, image.data(), image.size(), cudaMemcpyHostToDevice, stream.get()),
      kLoading);
  DORAD_RETURN_IF_ERROR(stream.Synchronize(kLoading));
  return std::make_shared<const CudaAdapterWeights>(std::move(memory), std::move(modules),
                                                    on_device);
}

CudaAdapterWeights::CudaAdapterWeights(DeviceBuffer memory,
                                       std::vector<kernels::DoraFactors> modules, const void* image)
    : id_(next_id++), memory_(std::move(memory)), modules_(std::move(modules)), image_(image) {}

int64_t ImageMapsOffset(int modules) {
  return RoundUp(modules * static_cast<int64_t>(sizeof(DoraFactors)), 256);
}

int64_t ImageBytes(int modules) {
  return ImageMapsOffset(modules) + modules * int64_t{2 * sizeof(CUtensorMap)};
}

absl::StatusOr<std::shared_ptr<const CudaAdapterWeights>> MakeRandomAdapter(const CudaModel& model,
                                                                            int rank, uint32_t seed,
                                                                            MemoryLedger* ledger) {
  DORAD_CHECK(rank % 8 == 0);
  std::vector<int> ids;  // of layers and tower
  for (int id = 0; id < model.modules().size(); ++id) {
    if (id != model.config().embedding && id != model.config().head) ids.push_back(id);
  }
  Layout layout;
  std::vector<int64_t> offsets;
  for (const int id : ids) {
    const BaseModule& module = model.modules().all()[id];
    offsets.push_back(layout.Add(rank * module.cols * 2));
    offsets.push_back(layout.Add(module.rows * rank * 2));
    offsets.push_back(layout.Add(module.rows * 4));
  }
  const int64_t image_at = layout.Add(ImageBytes(model.modules().size()));
  DORAD_ASSIGN_OR_RETURN(DeviceBuffer memory,
                         DeviceBuffer::Allocate(ledger, "adapters", layout.bytes()));
  DORAD_ASSIGN_OR_RETURN(const Stream stream, Stream::Create());
  std::vector<DoraFactors> modules(static_cast<size_t>(model.modules().size()));
  for (size_t i = 0; i < ids.size(); ++i) {
    const int id = ids[i];
    const BaseModule& module = model.modules().all()[id];
    auto* a = memory.as<__nv_bfloat16>(offsets[3 * i]);
    auto* b = memory.as<__nv_bfloat16>(offsets[3 * i + 1]);
    auto* g = memory.as<float>(offsets[3 * i + 2]);
    modules[id] = {a, b, g, 0.5f, rank, rank, 0};
    DORAD_RETURN_IF_CUDA_ERROR(
        kernels::FillRandom(a, rank * module.cols, 0.035f, seed++, stream.get()), kLoading);
    DORAD_RETURN_IF_CUDA_ERROR(
        kernels::FillRandom(b, module.rows * rank, 0.035f, seed++, stream.get()), kLoading);
    DORAD_RETURN_IF_CUDA_ERROR(kernels::FillConstant(g, module.rows, 1.01f, stream.get()),
                               kLoading);
  }
  return FinishAdapter(model, std::move(memory), image_at, std::move(modules), stream);
}

}  // namespace dorad::cuda
