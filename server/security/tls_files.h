// The certificate for new connections, kept up to date with its files. If changed files are broken,
// expired or inconsistent, the old certificate stays in effect.
//
// gRPC's FileWatcherCertificateProvider (1.51) does less: it accepts files that others may write,
// expired certificates and mismatched keys, reports neither failures nor expiry, and after a broken
// file refuses all new connections. Owned by SecurityManager. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/security/file_watcher.h"
#include "server/security/reloadable_files.h"
#include "server/security/tls_identity.h"

namespace dorad::security {

class TlsFiles {
 public:
  struct Paths {
    std::string certificates;
    std::string key;
    std::string client_ca;  // "": clients need no certificate
  };

  // Statuses of Open, without opening.
  static absl::Status Check(const Paths& paths);
  // on_failure runs after each failed reload. Statuses of FileWatcher::Read and CheckTlsIdentity.
  static absl::StatusOr<std::unique_ptr<TlsFiles>> Open(const Paths& paths,
                                                        std::function<void()> on_failure);

  // A new object after each reload.
  std::shared_ptr<const TlsIdentity> identity() const { return identity_.current(); }

  // See ReloadableFiles.
  void Poll() { identity_.Poll(); }
  absl::Status Reload() { return identity_.Reload(); }

 private:
  TlsFiles(const Paths& paths, std::function<void()> on_failure);
  static absl::StatusOr<TlsIdentity> Identify(const Paths& paths, FileWatcher::Texts texts);
  static absl::StatusOr<std::shared_ptr<const TlsIdentity>> Parse(const Paths& paths,
                                                                  FileWatcher::Texts texts);

  ReloadableFiles<TlsIdentity> identity_;
};

}  // namespace dorad::security
