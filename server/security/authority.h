// Who a caller is: the tokens file in effect, kept up to date. A file that is broken when it
// changes leaves the one before in effect. Owned by App. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/subscribers.h"
#include "server/security/followed.h"
#include "server/security/principal.h"
#include "server/security/token_table.h"

namespace dorad::security {

class Authority {
 public:
  // What a call brings to say who makes it.
  struct Credentials {
    std::vector<std::string> authorization;  // values of the metadata of that name
    std::string common_name;  // of the connection's verified certificate; "": it has none
  };

  // As Open, which it leaves to a later time.
  static absl::Status Check(const std::string& path);
  // on_failure runs after each reload that failed. As SettledFiles::Read and TokenTable::Parse.
  static absl::StatusOr<std::unique_ptr<Authority>> Open(const std::string& path,
                                                         std::function<void()> on_failure);

  // A token decides, if there is one; else the certificate. UNAUTHENTICATED: TOKEN_MISSING (neither
  // a token nor a certificate that the file lists), TOKEN_INVALID (of no known form, or nobody's).
  absl::StatusOr<std::shared_ptr<const Principal>> Identify(const Credentials& credentials) const;

  std::shared_ptr<const TokenTable> table() const { return table_.current(); }

  // on_change runs after each change of the table, on the thread that reads it: it may post a
  // wake-up, no more. As Subscribers'.
  int64_t Subscribe(std::function<void()> on_change) const {
    return subscribers_.Add(std::move(on_change));
  }
  void Unsubscribe(int64_t id) const { subscribers_.Remove(id); }

  // As Followed's.
  void Poll() { table_.Poll(); }
  absl::Status Reload() { return table_.Reload(); }

 private:
  Authority(const std::string& path, std::function<void()> on_failure);

  mutable Subscribers subscribers_;  // whoever may ask may subscribe
  Followed<TokenTable> table_;
};

}  // namespace dorad::security
