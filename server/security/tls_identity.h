// What a TLS listener shows and asks for, checked before anyone sees it. Immutable values; pure
// functions, hence thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace dorad::security {

// All PEM.
struct TlsIdentity {
  std::string key;
  std::string certificates;  // the server's own, then those up to the authority
  std::string client_ca;     // "": clients need no certificate
  // Of the server's own certificate.
  std::string subject;
  absl::Time expiry;
};

// Whether a handshake can be made with them at `now`, as OpenSSL sees it. INVALID_ARGUMENT
// (TLS_CERTIFICATE_INVALID, TLS_KEY_INVALID, TLS_KEY_MISMATCH, TLS_CLIENT_CA_INVALID),
// FAILED_PRECONDITION (TLS_CERTIFICATE_EXPIRED).
absl::StatusOr<TlsIdentity> CheckTlsIdentity(std::string certificates, std::string key,
                                             std::string client_ca, absl::Time now);

}  // namespace dorad::security
