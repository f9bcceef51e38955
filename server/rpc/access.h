// Who makes a call, and whether he may. What a call brings is looked at, never what an earlier one
// on the same connection brought: behind a proxy one connection carries the calls of many. Pure
// functions, hence thread-safe.
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
// authority everyone may do everything.
absl::StatusOr<Caller> Identify(const Services& services, const grpc::ServerContextBase& context,
                                const char* method);

// PERMISSION_DENIED (ADAPTER_NOT_ALLOWED). A name that no adapter can have is left to whoever says
// what is wrong with it.
absl::Status CheckAdapterAccess(const security::Principal& caller, const std::string& name);

// For what concerns every tenant. PERMISSION_DENIED (ROLE_MISSING).
absl::Status CheckIsAdmin(const security::Principal& caller);

// The same status without the names of adapters that the caller may not know of.
absl::Status WithoutForeignNames(const security::Principal& caller, absl::Status status);

// Room among the tenant's adapters for one more of `bytes` bytes; 0: not known yet.
// RESOURCE_EXHAUSTED (QUOTA_ADAPTERS, QUOTA_BYTES). Shared by whoever ends the publish.
using PublishRoom = std::shared_ptr<security::Quotas::Hold>;
absl::StatusOr<PublishRoom> ReservePublish(const Services& services,
                                           const security::Principal& caller, int64_t bytes);

}  // namespace dorad::rpc
