// Identifies and authorises the caller of a call. Uses the call's own credentials only, never those
// of an earlier call on the connection: behind a proxy one connection carries the calls of many
// callers. Pure functions and therefore thread-safe.
#pragma once

#include <grpcpp/server_context.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/adapter/registry/version.h"
#include "server/rpc/services.h"
#include "server/security/principal.h"
#include "server/security/quotas.h"

namespace dorad::rpc {

using Caller = std::shared_ptr<const security::Principal>;

// UNAUTHENTICATED (TOKEN_MISSING, TOKEN_INVALID), PERMISSION_DENIED (ROLE_MISSING). Without an
// authority every caller has all rights.
absl::StatusOr<Caller> Identify(const Services& services, const grpc::ServerContextBase& context,
                                const char* method);

// PERMISSION_DENIED (ADAPTER_NOT_ALLOWED). OK for an invalid name: its own check reports it.
absl::Status CheckAdapterAccess(const security::Principal& caller, const std::string& name);

// For methods that affect every tenant. PERMISSION_DENIED (ROLE_MISSING).
absl::Status CheckIsAdmin(const security::Principal& caller);

// The same status without names of adapters that are hidden from the caller.
absl::Status WithoutForeignNames(const security::Principal& caller, absl::Status status);

// Reserves room among the tenant's adapters. RESOURCE_EXHAUSTED (QUOTA_ADAPTERS, QUOTA_BYTES).
// Shared by all code that may end the publish; nullptr: there is no quota.
using PublishRoom = std::shared_ptr<security::Quotas::Hold>;
absl::StatusOr<PublishRoom> ReservePublish(const Services& services,
                                           const security::Principal& caller,
                                           const security::Quotas::Live& wanted);

}  // namespace dorad::rpc
