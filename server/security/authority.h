// Finds the principal of a call with the tokens file in effect, which it keeps up to date. When the
// file becomes broken, the table before stays in effect. Owned by SecurityManager. Thread-safe.
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
  // The credentials that a call brings.
  struct Credentials {
    std::vector<std::string> authorization;  // values of the metadata of that name
    std::string common_name;  // of the connection's verified certificate; "": it has none
  };

  // Statuses of Open, without opening.
  static absl::Status Check(const std::string& path);
  // on_failure runs after each reload that failed. Statuses of FileWatcher::Read and
  // TokenTable::Parse.
  static absl::StatusOr<std::unique_ptr<Authority>> Open(const std::string& path,
                                                         std::function<void()> on_failure);

  // A token decides, if there is one, else the certificate. UNAUTHENTICATED: TOKEN_MISSING (neither
  // a token nor a certificate that the file lists), TOKEN_INVALID (a token of another form, or one
  // that the file does not list).
  absl::StatusOr<std::shared_ptr<const Principal>> Identify(const Credentials& credentials) const;

  std::shared_ptr<const TokenTable> table() const { return table_.current(); }

  // on_change runs after each change of the table, on the thread that reads the file. It may post a
  // wake-up, no more. See Subscribers.
  int64_t Subscribe(std::function<void()> on_change) const {
    return subscribers_.Add(std::move(on_change));
  }
  void Unsubscribe(int64_t id) const { subscribers_.Remove(id); }

  // See ReloadableFiles.
  void Poll() { table_.Poll(); }
  absl::Status Reload() { return table_.Reload(); }

 private:
  Authority(const std::string& path, std::function<void()> on_failure);

  mutable Subscribers subscribers_;  // whoever may ask may subscribe
  ReloadableFiles<TokenTable> table_;
};

}  // namespace dorad::security
