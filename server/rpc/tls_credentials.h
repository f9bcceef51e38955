// TLS for a gRPC listener whose certificate may change while it runs.
//
// gRPC's own file watcher stops all new connections when a file is broken. Here gRPC calls at each
// handshake, and gets the last valid files of security::TlsFiles.
#pragma once

#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "server/security/tls_files.h"

namespace dorad::rpc {

// For one listener. With a client CA, a connection needs a certificate signed by it. `files` is
// borrowed; outlives the listener.
std::shared_ptr<grpc::ServerCredentials> MakeTlsCredentials(const security::TlsFiles* files);

}  // namespace dorad::rpc
