#include "server/backends/cuda/adapter_slots.h"

#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::cuda {

absl::StatusOr<AdapterSlots> AdapterSlots::Create(int slots, int modules, MemoryLedger* ledger) {
  AdapterSlots table(slots, modules);
  Layout layout;
  const int64_t elements = int64_t{slots} * modules;
  layout.Add(elements * static_cast<int64_t>(sizeof(kernels::DoraFactors)));
  table.maps_at_ = layout.Add(elements * int64_t{2 * sizeof(CUtensorMap)});
  DORAD_ASSIGN_OR_RETURN(table.memory_,
                         DeviceBuffer::Allocate(ledger, MemoryLedger::kWorkspace, layout.bytes()));
  return table;
}

absl::StatusOr<int> AdapterSlots::Assign(const CudaAdapterWeights& weights, const Stream& stream) {
  size_t oldest = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].adapter == weights.id()) {
      slots_[i].step = step_;
      return static_cast<int>(i);
    }
    if (slots_[i].step < slots_[oldest].step) oldest = i;
  }
  DORAD_CHECK(slots_[oldest].step < step_);
  const auto slot = static_cast<int64_t>(oldest);
  const int64_t factors = modules_ * static_cast<int64_t>(sizeof(kernels::DoraFactors));
  const int64_t maps = modules_ * int64_t{2 * sizeof(CUtensorMap)};
  const char* image = static_cast<const char*>(weights.image());
  DORAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(memory_.as<>(slot * factors), image, factors,
                                             cudaMemcpyDeviceToDevice, stream.get()),
                             "filling an adapter slot");
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(memory_.as<>(maps_at_ + slot * maps), image + ImageMapsOffset(modules_), maps,
                      cudaMemcpyDeviceToDevice, stream.get()),
      "filling an adapter slot");
  slots_[oldest] = {weights.id(), step_};
  return static_cast<int>(slot);
}

}  // namespace dorad::cuda
