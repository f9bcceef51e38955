// The certificate that is shown to new connections, kept up to date with its files. What is broken,
// expired or does not fit together leaves the one before in effect. Owned by App. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
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

  // on_failure runs after each reload that failed. As SettledFiles::Read and CheckTlsIdentity.
  static absl::StatusOr<std::unique_ptr<TlsFiles>> Open(const Paths& paths,
                                                        std::function<void()> on_failure);

  // Another object after each reload.
  std::shared_ptr<const TlsIdentity> identity() const ABSL_LOCKS_EXCLUDED(mu_);

  // Looks whether the files have changed, and reloads them then. To be called about once a second.
  void Poll() ABSL_LOCKS_EXCLUDED(reading_);
  // Reads the files now. On failure what was in effect stays.
  absl::Status Reload() ABSL_LOCKS_EXCLUDED(reading_);

 private:
  TlsFiles(const Paths& paths, std::function<void()> on_failure);
  absl::Status Take(absl::StatusOr<SettledFiles::Texts> texts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(reading_);

  const Paths paths_;
  const std::function<void()> on_failure_;
  absl::Mutex reading_;  // acquired before mu_
  SettledFiles files_ ABSL_GUARDED_BY(reading_);
  mutable absl::Mutex mu_;
  std::shared_ptr<const TlsIdentity> identity_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::security
