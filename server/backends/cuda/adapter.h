// One adapter version on the GPU. Immutable and therefore thread-safe; owned by the registry's
// versions.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/dora/factors.h"
#include "server/adapter/registry/version.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/model.h"

namespace dorad::cuda {

class CudaAdapterWeights final : public adapter::AdapterWeights {
 public:
  // image: device memory in `memory`, see below.
  CudaAdapterWeights(DeviceBuffer memory, std::vector<kernels::DoraFactors> modules,
                     const void* image);

  // Unique among all objects of the process: identifies the contents of a slot.
  uint64_t id() const { return id_; }
  // By module id; pointers are to device memory. rank 0 where the module is not adapted. Linear
  // modules: a [R, in], b [out, ldb]. The embedding: a [V, R], b [D, ldb].
  const std::vector<kernels::DoraFactors>& modules() const { return modules_; }
  // On the device: modules(), followed (at ImageMapsOffset) by two tensor maps for each module,
  // zeros with other instruction sets than kSm90. The contents of a slot in the table of adapters.
  const void* image() const { return image_; }
  int64_t bytes() const { return memory_.bytes(); }
  // The whole adapter: its factors, followed by the image.
  const std::byte* memory() const { return memory_.as<std::byte>(); }

 private:
  const uint64_t id_;
  const DeviceBuffer memory_;
  const std::vector<kernels::DoraFactors> modules_;
  const void* const image_;
};

// Layout of an image for a model with `modules` modules.
int64_t ImageMapsOffset(int modules);
int64_t ImageBytes(int modules);

// Writes the image at image_at of `memory`, after the factors. Waits for the stream's work.
absl::StatusOr<std::shared_ptr<const CudaAdapterWeights>> FinishAdapter(
    const CudaModel& model, DeviceBuffer memory, int64_t image_at,
    std::vector<kernels::DoraFactors> modules, const Stream& stream);

// A DoRA adapter of one rank on all linear modules of layers and tower with random factors, for
// benchmarks; g is near 1. REQUIRES: rank is a multiple of 8.
absl::StatusOr<std::shared_ptr<const CudaAdapterWeights>> MakeRandomAdapter(const CudaModel& model,
                                                                            int rank, uint32_t seed,
                                                                            MemoryLedger* ledger);

}  // namespace dorad::cuda
