#include "server/backends/cuda/driver.h"

#include <cuda_runtime_api.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "server/platform/error.h"
#include "server/platform/log.h"

namespace dorad::cuda {
namespace {

template <typename Function>
bool LookUp(const char* name, Function* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return false;
  *function = reinterpret_cast<Function>(found);
  return true;
}

bool LookUpAll(Driver* driver) {
  return LookUp("cuMemAddressReserve", &driver->address_reserve) &&
         LookUp("cuMemAddressFree", &driver->address_free) &&
         LookUp("cuMemCreate", &driver->create) && LookUp("cuMemRelease", &driver->release) &&
         LookUp("cuMemMap", &driver->map) && LookUp("cuMemUnmap", &driver->unmap) &&
         LookUp("cuMemSetAccess", &driver->set_access) &&
         LookUp("cuMemExportToShareableHandle", &driver->export_handle) &&
         LookUp("cuGetErrorString", &driver->error_string);
}

}  // namespace

absl::StatusOr<const Driver*> Driver::Get() {
  static const Driver* const driver = [] {
    static Driver found;
    return LookUpAll(&found) ? &found : nullptr;
  }();
  if (driver != nullptr) return driver;
  return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_UNAVAILABLE",
                   "the CUDA driver lacks functions for virtual memory");
}

absl::Status Driver::ToStatus(CUresult result, std::string_view what) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* text = nullptr;
  (void)error_string(result, &text);
  const std::string error = text == nullptr ? absl::StrCat("CUresult ", result) : text;
  LogError("a CUDA call failed", {{"what", std::string(what)}, {"error", error}});
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                     absl::StrCat(std::string(what), " ran out of GPU memory"));
  }
  return MakeError(absl::StatusCode::kInternal, "CUDA_ERROR",
                   absl::StrCat(std::string(what), " failed on the GPU: ", error));
}

}  // namespace dorad::cuda
