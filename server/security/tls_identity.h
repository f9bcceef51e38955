// A TLS listener's certificate, key and client CA, checked before clients see them. Immutable
// values and pure functions and therefore thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace dorad::security {

// All PEM.
struct TlsIdentity {
  std::string key;
  std::string certificates;  // the server's own, then the intermediates
  std::string client_ca;     // "": clients need no certificate
  // Of the server's own certificate.
  std::string subject;
  absl::Time expiry;
};

// Checks that OpenSSL can make a handshake with them at `now`. INVALID_ARGUMENT
// (TLS_CERTIFICATE_INVALID, TLS_KEY_INVALID, TLS_KEY_MISMATCH, TLS_CLIENT_CA_INVALID),
// FAILED_PRECONDITION (TLS_CERTIFICATE_EXPIRED).
absl::StatusOr<TlsIdentity> CheckTlsIdentity(std::string certificates, std::string key,
                                             std::string client_ca, absl::Time now);

}  // namespace dorad::security
