// Who a caller is: the tokens file in effect, kept up to date. A file that is broken when it
// changes leaves the one before in effect. Owned by App. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/security/principal.h"
#include "server/security/settled_files.h"
#include "server/security/token_table.h"

namespace dorad::security {

class Authority {
 public:
  // What a call brings to say who makes it.
  struct Credentials {
    std::vector<std::string> authorization;  // values of the metadata of that name
    std::string common_name;  // of the connection's verified certificate; "": it has none
  };

  // on_failure runs after each reload that failed. As SettledFiles::Read and TokenTable::Parse.
  static absl::StatusOr<std::unique_ptr<Authority>> Open(const std::string& path,
                                                         std::function<void()> on_failure);

  // A token decides, if there is one; else the certificate. UNAUTHENTICATED: TOKEN_MISSING (neither
  // a token nor a certificate that the file lists), TOKEN_INVALID (of no known form, or nobody's).
  absl::StatusOr<std::shared_ptr<const Principal>> Identify(const Credentials& credentials) const;

  std::shared_ptr<const TokenTable> table() const ABSL_LOCKS_EXCLUDED(mu_);

  // Looks whether the file has changed, and reloads it then. To be called about once a second.
  void Poll() ABSL_LOCKS_EXCLUDED(reading_);
  // Reads the file now. On failure what was in effect stays.
  absl::Status Reload() ABSL_LOCKS_EXCLUDED(reading_);

 private:
  Authority(std::string path, std::function<void()> on_failure);
  absl::Status Take(const absl::StatusOr<SettledFiles::Texts>& texts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(reading_);

  const std::string path_;
  const std::function<void()> on_failure_;
  absl::Mutex reading_;  // acquired before mu_
  SettledFiles file_ ABSL_GUARDED_BY(reading_);
  mutable absl::Mutex mu_;
  std::shared_ptr<const TokenTable> table_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::security
