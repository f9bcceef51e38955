// TLS for a gRPC listener whose certificate may change while it runs.
//
// gRPC's own file watcher stops all new connections when a file is broken. Here gRPC asks at each
// handshake, and gets what security::TlsFiles has found to be good.
#pragma once

#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "server/security/tls_files.h"

namespace dorad::rpc {

// For one listener. With a client CA, a connection needs a certificate that it has signed. `files`
// is borrowed; outlives the listener.
std::shared_ptr<grpc::ServerCredentials> MakeTlsCredentials(const security::TlsFiles* files);

}  // namespace dorad::rpc
