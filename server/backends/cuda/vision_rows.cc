#include "server/backends/cuda/vision_rows.h"

#include <algorithm>
#include <utility>

#include "server/backends/cuda/array_writer.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::cuda {

absl::Status VisionRows::Upload(const Sizes& sizes, const CudaAdapterWeights* adapter) {
  int slot = -1;
  slots_.BeginStep();
  if (adapter != nullptr) {
    DORAD_ASSIGN_OR_RETURN(slot, slots_.Assign(*adapter, stream_));
  }
  adapted_ = adapter != nullptr;
  rows_.clear();
  for (const auto& [rows, of_module] : sizes) {
    const bool adapted = of_module && adapted_;
    LinearRows to;
    to.rows = rows;
    to.adapted = adapted;
    to.ranges = {adapted ? AdapterRange{adapter, slot, 0, rows}
                         : AdapterRange{nullptr, -1, 0, rows}};
    to.table = slots_.table();
    to.maps = slots_.maps();
    rows_.push_back(std::move(to));
  }
  const auto write = [&](std::byte* host, std::byte* device) {
    ArrayWriter writer(host, device);
    for (LinearRows& rows : rows_) WriteSegments(&rows, writer);
    return writer.bytes();
  };
  const int64_t bytes = write(nullptr, nullptr);
  DORAD_RETURN_IF_ERROR(Grow(&host_, bytes));
  DORAD_RETURN_IF_ERROR(Grow(&device_, ledger_, MemoryLedger::kWorkspace, bytes));
  (void)write(host_.as(), device_.as<std::byte>());
  return ToStatus(
      cudaMemcpyAsync(device_.as<>(), host_.as(), bytes, cudaMemcpyHostToDevice, stream_.get()),
      "computing an image");
}

const LinearRows& VisionRows::Find(int64_t rows, bool of_module) const {
  const bool adapted = of_module && adapted_;
  const auto found = std::find_if(rows_.begin(), rows_.end(), [&](const LinearRows& r) {
    return r.rows == rows && r.adapted == adapted;
  });
  DORAD_CHECK(found != rows_.end());
  return *found;
}

}  // namespace dorad::cuda
