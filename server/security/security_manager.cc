#include "server/security/security_manager.h"

#include <string>
#include <utility>

#include "server/platform/error.h"
#include "server/platform/log.h"
#include "server/security/listener_policy.h"

namespace dorad::security {

absl::StatusOr<std::unique_ptr<SecurityManager>> SecurityManager::Open(
    const ServerConfig& server, const SecurityConfig& security) {
  DORAD_RETURN_IF_ERROR(CheckListenerPolicy(server, security));
  std::unique_ptr<SecurityManager> manager(new SecurityManager());
  SecurityManager* const self = manager.get();
  if (!security.tokens_file.empty()) {
    DORAD_ASSIGN_OR_RETURN(manager->authority_, Authority::Open(security.tokens_file, [self] {
                             ++self->tokens_reload_failures_;
                           }));
    manager->quotas_ = std::make_unique<Quotas>([self](const std::string& tenant) {
      return self->authority_->table()->FindTenant(tenant).quota;
    });
  }
  if (!security.tls_cert.empty()) {
    DORAD_ASSIGN_OR_RETURN(
        manager->tls_, TlsFiles::Open({security.tls_cert, security.tls_key, security.tls_client_ca},
                                      [self] { ++self->tls_reload_failures_; }));
  }
  if (manager->authority_ || manager->tls_) {
    manager->poller_ = std::make_unique<Poller>([self] {
      if (self->authority_) self->authority_->Poll();
      if (self->tls_) self->tls_->Poll();
    });
  }
  if (security.allow_insecure) {
    LogWarning("security.allow_insecure is set: gRPC may be open to the network");
  }
  return manager;
}

absl::Status SecurityManager::Reload() {
  absl::Status status;
  if (authority_) status.Update(authority_->Reload());
  if (tls_) status.Update(tls_->Reload());
  return status;
}

SecurityManager::Stats SecurityManager::stats() const {
  Stats stats{tokens_reload_failures_, tls_reload_failures_, std::nullopt};
  if (tls_) stats.tls_expiry = tls_->identity()->expiry;
  return stats;
}

}  // namespace dorad::security
