// Functions of the CUDA driver that the runtime does not offer, looked up once. Nothing here links
// to the driver, so that the binary also starts without one. Immutable and therefore thread-safe.
#pragma once

#include <cuda.h>

#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dorad::cuda {

struct Driver {
  decltype(&cuMemAddressReserve) address_reserve = nullptr;
  decltype(&cuMemAddressFree) address_free = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&cuGetErrorString) error_string = nullptr;

  // FAILED_PRECONDITION (DEVICE_UNAVAILABLE) where a function is missing.
  static absl::StatusOr<const Driver*> Get();
  // As cuda::ToStatus.
  absl::Status ToStatus(CUresult result, std::string_view what) const;
};

}  // namespace dorad::cuda
