// Reads the two files of a PEFT folder, within the operator's allowed folders. Functions are
// thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/platform/files/byte_buffer.h"

namespace dorad::adapter {

struct AdapterFiles {
  std::string config_json;
  SharedBytes safetensors;
};

// Gets the number of bytes of the tensors' file before they are read. An error ends the reading.
using SizeCheck = std::function<absl::Status(int64_t bytes)>;

struct FolderAccess {
  // Folder and files must lie, after resolving links, beneath one of these.
  std::vector<std::string> allowed_roots;
  // The operator's own path: allowed_roots does not apply.
  bool trusted = false;
  SizeCheck admit = nullptr;  // null: any size
};

// Reads adapter_config.json and adapter_model.safetensors, nothing else. PERMISSION_DENIED
// (PATH_NOT_ALLOWED), NOT_FOUND (ADAPTER_FOLDER_NOT_FOUND), INVALID_ARGUMENT
// (ADAPTER_FILE_MISSING, ADAPTER_FORMAT_UNSUPPORTED, ADAPTER_TOO_LARGE, ADAPTER_CONFIG_TOO_LARGE),
// UNAVAILABLE (FILE_UNREADABLE), statuses of access.admit.
absl::StatusOr<AdapterFiles> ReadAdapterFolder(const std::string& path, const FolderAccess& access,
                                               int64_t max_bytes);

// Logs missing roots; they may be mounted later.
void WarnOfMissingRoots(const std::vector<std::string>& roots);

// Checks that the folder has both files, without opening them: NOT_FOUND
// (ADAPTER_FOLDER_NOT_FOUND), INVALID_ARGUMENT (ADAPTER_FILE_MISSING, ADAPTER_FORMAT_UNSUPPORTED).
absl::Status CheckAdapterFolder(const std::string& path);

}  // namespace dorad::adapter
