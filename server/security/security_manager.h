// Tokens, quotas and TLS, as the section `security` of the configuration defines them. Opened
// before the listeners; its own thread keeps it up to date with its files. Owned by App, outlives
// the engine. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/platform/config/config.h"
#include "server/platform/net/poller.h"
#include "server/security/authority.h"
#include "server/security/quotas.h"
#include "server/security/tls_files.h"

namespace dorad::security {

class SecurityManager {
 public:
  // Statuses of CheckListenerPolicy, Authority::Open and TlsFiles::Open.
  static absl::StatusOr<std::unique_ptr<SecurityManager>> Open(const ServerConfig& server,
                                                               const SecurityConfig& security);

  // nullptr: no authentication.
  const Authority* authority() const { return authority_.get(); }
  // nullptr without an authority: there are no tenants.
  Quotas* quotas() { return quotas_.get(); }
  // nullptr: no TLS.
  const TlsFiles* tls() const { return tls_.get(); }
  // Whether callers must present a token or a certificate.
  bool asks() const {
    return authority_ != nullptr || (tls_ && !tls_->identity()->client_ca.empty());
  }

  // Reads all files now. Broken files keep their old values; returns the first failure.
  absl::Status Reload();

  struct Stats {
    int64_t tokens_reload_failures = 0;
    int64_t tls_reload_failures = 0;
    std::optional<absl::Time> tls_expiry;  // nullopt: no TLS
  };
  Stats stats() const;

 private:
  SecurityManager() = default;

  std::atomic<int64_t> tokens_reload_failures_{0};
  std::atomic<int64_t> tls_reload_failures_{0};
  std::unique_ptr<Authority> authority_;
  std::unique_ptr<Quotas> quotas_;
  std::unique_ptr<TlsFiles> tls_;
  std::unique_ptr<Poller> poller_;  // nullptr: no files
};

}  // namespace dorad::security
