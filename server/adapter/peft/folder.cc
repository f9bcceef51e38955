#include "server/adapter/peft/folder.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/adapter/peft/strict_json.h"
#include "server/adapter/peft/violations.h"
#include "server/platform/error.h"
#include "server/platform/files/file.h"
#include "server/platform/log.h"
#include "server/platform/net/unique_fd.h"

namespace dorad::adapter {
namespace {

constexpr char kConfigName[] = "adapter_config.json";
constexpr char kTensorsName[] = "adapter_model.safetensors";
constexpr char kPickleName[] = "adapter_model.bin";

// The path without links, "." and ".."; nullopt when it does not exist or cannot be followed.
std::optional<std::string> RealPath(const std::string& path) {
  if (path.find('\0') != std::string::npos) return std::nullopt;
  const std::unique_ptr<char, decltype(&free)> real(realpath(path.c_str(), nullptr), &free);
  if (real == nullptr) return std::nullopt;
  return std::string(real.get());
}

// The nearest folder above a path that does not exist, without links; nullopt when a link on the
// way leads nowhere: its target must look like other missing files.
std::optional<std::string> RealAncestor(std::filesystem::path path) {
  while (path.has_relative_path()) {
    std::error_code error;
    if (std::filesystem::is_symlink(path, error)) return std::nullopt;
    path = path.parent_path();
    if (std::optional<std::string> real = RealPath(path.string())) return real;
  }
  return std::nullopt;
}

// Both without links. Equal counts as beneath.
bool IsBeneath(const std::string& path, const std::string& root) {
  return path == root || root == "/" || absl::StartsWith(path, absl::StrCat(root, "/"));
}

absl::Status NotAllowed(const std::string& path) {
  return MakeError(
      absl::StatusCode::kPermissionDenied, "PATH_NOT_ALLOWED",
      absl::StrCat(Quoted(path), " does not lie beneath one of adapters.allowed_roots"));
}

absl::Status FolderNotFound(const std::string& path) {
  return MakeError(absl::StatusCode::kNotFound, "ADAPTER_FOLDER_NOT_FOUND",
                   absl::StrCat("there is no folder ", Quoted(path)));
}

// The folder without links, and the allowed root above it (empty: trusted).
struct Folder {
  std::string path;
  std::string root;
};

absl::StatusOr<Folder> Resolve(const std::string& path, const FolderAccess& access) {
  const std::optional<std::string> real = RealPath(path);
  if (access.trusted) {
    if (!real) return FolderNotFound(path);
    return Folder{*real, ""};
  }
  if (access.allowed_roots.empty()) {
    return MakeError(absl::StatusCode::kPermissionDenied, "PATH_NOT_ALLOWED",
                     "this server reads no folders: adapters.allowed_roots is empty");
  }
  const std::optional<std::string> above = real ? std::nullopt : RealAncestor(path);
  for (const std::string& allowed : access.allowed_roots) {
    const std::optional<std::string> root = RealPath(allowed);
    if (!root) continue;
    if (real && IsBeneath(*real, *root)) return Folder{*real, *root};
    // A missing folder is reported only beneath an allowed root.
    if (above && IsBeneath(*above, *root)) return FolderNotFound(path);
  }
  return NotAllowed(path);
}

absl::StatusOr<ByteBuffer> ReadAdmitted(const std::string& path, uint64_t max_bytes,
                                        const SizeCheck& admit) {
  DORAD_ASSIGN_OR_RETURN(RegularFile file, RegularFile::Open(path, max_bytes));
  if (admit) DORAD_RETURN_IF_ERROR(admit(static_cast<int64_t>(file.size())));
  return file.ReadAll();
}

// Reads the file `name` of the folder. Another process may replace a part of the path with a link
// after the check, so openat2 also confines the open to the root.
absl::StatusOr<ByteBuffer> ReadFrom(const Folder& folder, const std::string& name,
                                    uint64_t max_bytes, const SizeCheck& admit) {
  const std::string path = absl::StrCat(folder.path, "/", name);
  if (folder.root.empty()) return ReadAdmitted(path, max_bytes, admit);
  const std::optional<std::string> real = RealPath(path);
  if (!real) {
    return MakeError(absl::StatusCode::kNotFound, "FILE_NOT_FOUND",
                     absl::StrCat("no such file: ", name));
  }
  if (!IsBeneath(*real, folder.root)) return NotAllowed(path);
  const UniqueFd root(open(folder.root.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  const std::string relative = real->substr(folder.root == "/" ? 1 : folder.root.size() + 1);
  open_how how = {};
  how.flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
  const UniqueFd file(
      static_cast<int>(syscall(SYS_openat2, root.get(), relative.c_str(), &how, sizeof(how))));
  if (file.ok()) {
    return ReadAdmitted(absl::StrCat("/proc/self/fd/", file.get()), max_bytes, admit);
  }
  // Kernels before 5.6 and some sandboxes lack openat2: only the check above applies.
  if (errno == ENOSYS || errno == EPERM) return ReadAdmitted(*real, max_bytes, admit);
  if (errno == EXDEV || errno == ELOOP) return NotAllowed(path);
  return MakeError(absl::StatusCode::kUnavailable, "FILE_UNREADABLE",
                   absl::StrCat("cannot open ", name));
}

absl::Status Missing(const Folder& folder, const std::string& name) {
  const std::string pickle = absl::StrCat(folder.path, "/", kPickleName);
  if (name == kTensorsName && access(pickle.c_str(), F_OK) == 0) {
    return MakeInvalid(kPickleName, {{kPickleName, "ADAPTER_FORMAT_UNSUPPORTED",
                                      "pickled weights can run code and are never read; save the "
                                      "adapter with safe_serialization=True"}});
  }
  return MakeInvalid(name, {{name, "ADAPTER_FILE_MISSING", "the folder has no such file"}});
}

absl::StatusOr<ByteBuffer> ReadPart(const Folder& folder, const std::string& name,
                                    uint64_t max_bytes, const std::string& too_large,
                                    const SizeCheck& admit) {
  absl::StatusOr<ByteBuffer> bytes = ReadFrom(folder, name, max_bytes, admit);
  const std::string reason = ReasonOf(bytes.status());
  if (reason == "FILE_NOT_FOUND") return Missing(folder, name);
  if (reason == "FILE_TOO_LARGE") {
    return MakeInvalid(
        name, {{name, too_large, absl::StrCat("the file has more than ", max_bytes, " bytes")}});
  }
  return bytes;
}

}  // namespace

absl::StatusOr<AdapterFiles> ReadAdapterFolder(const std::string& path, const FolderAccess& access,
                                               int64_t max_bytes) {
  DORAD_ASSIGN_OR_RETURN(const Folder folder, Resolve(path, access));
  DORAD_ASSIGN_OR_RETURN(
      const ByteBuffer config,
      ReadPart(folder, kConfigName, JsonLimits().max_bytes, "ADAPTER_CONFIG_TOO_LARGE", nullptr));
  AdapterFiles files;
  files.config_json.assign(reinterpret_cast<const char*>(config.data()), config.size());
  DORAD_ASSIGN_OR_RETURN(ByteBuffer tensors,
                         ReadPart(folder, kTensorsName, static_cast<uint64_t>(max_bytes),
                                  "ADAPTER_TOO_LARGE", access.admit));
  files.safetensors = Share(std::move(tensors));
  return files;
}

void WarnOfMissingRoots(const std::vector<std::string>& roots) {
  for (const std::string& root : roots) {
    std::error_code error;
    if (std::filesystem::is_directory(root, error)) continue;
    LogWarning("adapters.allowed_roots names a folder that is not there", {{"path", root}});
  }
}

absl::Status CheckAdapterFolder(const std::string& path) {
  DORAD_ASSIGN_OR_RETURN(const Folder folder, Resolve(path, {{}, /*trusted=*/true}));
  for (const char* name : {kConfigName, kTensorsName}) {
    if (access(absl::StrCat(folder.path, "/", name).c_str(), F_OK) != 0) {
      return Missing(folder, name);
    }
  }
  return absl::OkStatus();
}

}  // namespace dorad::adapter
