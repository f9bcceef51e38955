// Finds the principal of a call in the current tokens file. A broken new file leaves the old table
// in effect. Owned by SecurityManager. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/platform/subscribers.h"
#include "server/security/principal.h"
#include "server/security/reloadable_files.h"
#include "server/security/token_table.h"

namespace dorad::security {

class Authority {
 public:
  // The credentials of a call.
  struct Credentials {
    std::vector<std::string> authorization;  // values of the metadata of that name
    std::string common_name;  // of the connection's verified certificate; "": it has none
  };

  // Statuses of Open, without opening.
  static absl::Status Check(const std::string& path);
  // on_failure runs after each failed reload. Statuses of FileWatcher::Read and TokenTable::Parse.
  static absl::StatusOr<std::unique_ptr<Authority>> Open(const std::string& path,
                                                         std::function<void()> on_failure);

  // Uses the token if there is one, else the certificate. UNAUTHENTICATED: TOKEN_MISSING (neither a
  // token nor a certificate that the file lists), TOKEN_INVALID (a malformed or unlisted token).
  absl::StatusOr<std::shared_ptr<const Principal>> Identify(const Credentials& credentials) const;

  std::shared_ptr<const TokenTable> table() const { return table_.current(); }

  // on_change runs after each change of the table, on the thread that reads the file; it may only
  // post a wake-up. See Subscribers.
  int64_t Subscribe(std::function<void()> on_change) const {
    return subscribers_.Add(std::move(on_change));
  }
  void Unsubscribe(int64_t id) const { subscribers_.Remove(id); }

  // See ReloadableFiles.
  void Poll() { table_.Poll(); }
  absl::Status Reload() { return table_.Reload(); }

 private:
  Authority(const std::string& path, std::function<void()> on_failure);

  mutable Subscribers subscribers_;  // mutable: readers may subscribe
  ReloadableFiles<TokenTable> table_;
};

}  // namespace dorad::security
