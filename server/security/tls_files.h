// The certificate that is shown to new connections, kept up to date with its files. What is broken,
// expired or does not fit together leaves the one before in effect. Owned by App. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/security/followed.h"
#include "server/security/settled_files.h"
#include "server/security/tls_identity.h"

namespace dorad::security {

class TlsFiles {
 public:
  struct Paths {
    std::string certificates;
    std::string key;
    std::string client_ca;  // "": clients need no certificate
  };

  // As Open, which it leaves to a later time.
  static absl::Status Check(const Paths& paths);
  // on_failure runs after each reload that failed. As SettledFiles::Read and CheckTlsIdentity.
  static absl::StatusOr<std::unique_ptr<TlsFiles>> Open(const Paths& paths,
                                                        std::function<void()> on_failure);

  // Another object after each reload.
  std::shared_ptr<const TlsIdentity> identity() const { return identity_.current(); }

  // As Followed's.
  void Poll() { identity_.Poll(); }
  absl::Status Reload() { return identity_.Reload(); }

 private:
  TlsFiles(const Paths& paths, std::function<void()> on_failure);
  static absl::StatusOr<TlsIdentity> Identify(const Paths& paths, SettledFiles::Texts texts);
  static absl::StatusOr<std::shared_ptr<const TlsIdentity>> Understand(const Paths& paths,
                                                                       SettledFiles::Texts texts);

  Followed<TlsIdentity> identity_;
};

}  // namespace dorad::security
