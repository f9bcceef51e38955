#include "server/rpc/tls_credentials.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/platform/check.h"

namespace dorad::rpc {
namespace {

class TlsCredentials final : public grpc::ServerCredentials {
 public:
  explicit TlsCredentials(const security::TlsFiles* files) : files_(files) {
    const bool asks_clients = !files->identity()->client_ca.empty();
    credentials_ = grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(
            asks_clients ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                         : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE,
            &TlsCredentials::Fetch, this));
    DORAD_CHECK(credentials_ != nullptr);
  }
  ~TlsCredentials() override { grpc_server_credentials_release(credentials_); }

  // A processor's result would be kept for the whole connection (see access.h).
  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {
    DORAD_CHECK(false);
  }

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  // Called at the start and at each handshake.
  static grpc_ssl_certificate_config_reload_status Fetch(
      void* self, grpc_ssl_server_certificate_config** config) {
    return static_cast<TlsCredentials*>(self)->FetchNext(config);
  }

  grpc_ssl_certificate_config_reload_status FetchNext(grpc_ssl_server_certificate_config** config)
      ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    const std::shared_ptr<const security::TlsIdentity> now = files_->identity();
    if (now == shown_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair{now->key.c_str(), now->certificates.c_str()};
    // gRPC requires roots here even without client certificates; then they are unused.
    const std::string& roots = now->client_ca.empty() ? now->certificates : now->client_ca;
    *config = grpc_ssl_server_certificate_config_create(roots.c_str(), &pair, 1);
    shown_ = now;
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const security::TlsFiles* const files_;
  grpc_server_credentials* credentials_;
  absl::Mutex mu_;
  std::shared_ptr<const security::TlsIdentity> shown_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> MakeTlsCredentials(const security::TlsFiles* files) {
  return std::make_shared<TlsCredentials>(files);
}

}  // namespace dorad::rpc
