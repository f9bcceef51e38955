#include "server/app/config_check.h"

#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/adapter/peft/folder.h"
#include "server/adapter/registry/version.h"
#include "server/app/options_from_config.h"
#include "server/backends/backend.h"
#include "server/platform/error.h"
#include "server/platform/net/listen_address.h"
#include "server/security/authority.h"
#include "server/security/listener_policy.h"
#include "server/security/tls_files.h"

namespace dorad {
namespace {

class Checks {
 public:
  explicit Checks(const Config& config) : config_(config) {}

  absl::Status Run() && {
    if (!config_.model.path.empty()) Add("model", Backend::Check(config_));
    for (const auto& [name, folder] : config_.adapters.preload) {
      const std::string key = absl::StrCat("adapters.preload.", name);
      Add(key, adapter::CheckAdapterName(name));
      Add(key, adapter::CheckAdapterFolder(folder));
    }
    CheckListeners();
    for (Violation& problem :
         ViolationsOf(security::CheckListenerPolicy(config_.server, config_.security))) {
      problems_.push_back(std::move(problem));
    }
    CheckSecurityFiles();
    CheckStore();
    if (problems_.empty()) return absl::OkStatus();
    return MakeInvalid("configuration", std::move(problems_));
  }

 private:
  void Add(const std::string& field, const absl::Status& status) {
    if (status.ok()) return;
    const std::vector<Violation> violations = ViolationsOf(status);
    if (violations.empty()) {
      problems_.push_back({field, ReasonOf(status), std::string(status.message())});
    }
    for (const Violation& violation : violations) {
      problems_.push_back(
          {absl::StrCat(field, ": ", violation.field), violation.reason, violation.description});
    }
  }

  void CheckListeners() {
    const ServerConfig& server = config_.server;
    const std::string& shared_memory = server.shared_memory_socket;
    const std::vector<std::pair<const char*, std::string>> listeners = {
        {"server.grpc_listen", server.grpc_listen},
        {"server.admin_listen", server.admin_listen},
        {"server.metrics_listen", server.metrics_listen},
        {"server.shared_memory_socket",
         shared_memory.empty() ? "" : absl::StrCat("unix:", shared_memory)}};
    std::vector<std::pair<const char*, ListenAddress>> before;
    for (const auto& [key, text] : listeners) {
      const absl::StatusOr<ListenAddress> address = ParseListenAddress(text);
      if (text.empty()) continue;  // off
      Add(key,
          address.status());  // only of a shared-memory socket: the others the reader has refused
      if (!address.ok()) continue;
      if (!address->unix_path.empty()) CheckSocket(key, address->unix_path);
      for (const auto& [other, taken] : before) {
        if (!Collide(*address, taken)) continue;
        problems_.push_back({key, "PORT_IN_USE", absl::StrCat(text, " is taken by ", other)});
      }
      before.emplace_back(key, *address);
    }
  }

  void CheckSecurityFiles() {
    const SecurityConfig& files = config_.security;
    if (!files.tokens_file.empty()) {
      Add("security.tokens_file", security::Authority::Check(files.tokens_file));
    }
    if (!files.tls_cert.empty() && !files.tls_key.empty()) {
      Add("security.tls_cert",
          security::TlsFiles::Check({files.tls_cert, files.tls_key, files.tls_client_ca}));
    }
  }

  // Only the start can check whether another process listens there.
  void CheckSocket(const char* key, const std::string& path) {
    std::error_code error;
    const std::filesystem::file_status there = std::filesystem::status(path, error);
    if (std::filesystem::exists(there) && !std::filesystem::is_socket(there)) {
      problems_.push_back(
          {key, "LISTEN_FAILED", absl::StrCat(path, " exists, but is not a socket")});
    }
    CheckParent(key, path);
  }

  void CheckStore() {
    const std::string& path = config_.adapters.store_path;
    if (path.empty()) return;
    std::error_code error;
    const std::filesystem::file_status there = std::filesystem::status(path, error);
    if (std::filesystem::exists(there) && !std::filesystem::is_directory(there)) {
      problems_.push_back({"adapters.store_path", "STORE_UNAVAILABLE",
                           absl::StrCat(path, " exists, but is not a folder")});
    }
    CheckParent("adapters.store_path", path);
  }

  // Sockets and the store's folder are created, their parent folder is not.
  void CheckParent(const char* key, const std::string& path) {
    std::filesystem::path whole = std::filesystem::absolute(path).lexically_normal();
    if (!whole.has_filename()) whole = whole.parent_path();
    std::error_code error;
    if (std::filesystem::is_directory(whole.parent_path(), error)) return;
    problems_.push_back({key, "FOLDER_NOT_FOUND",
                         absl::StrCat("there is no folder ", whole.parent_path().string())});
  }

  const Config& config_;
  std::vector<Violation> problems_;
};

}  // namespace

absl::Status CheckStart(const Config& config) {
  const Config resolved = Resolved(config);
  return Checks(resolved).Run();
}

}  // namespace dorad
