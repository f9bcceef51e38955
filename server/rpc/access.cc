#include "server/rpc/access.h"

#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/adapter/registry/registry.h"
#include "server/adapter/registry/registry_errors.h"
#include "server/platform/error.h"
#include "server/security/authority.h"
#include "server/security/method_rules.h"

namespace dorad::rpc {
namespace {

constexpr char kAuthorization[] = "authorization";
constexpr char kCommonName[] = "x509_common_name";
constexpr int kPage = 256;

absl::Status Denied(const char* reason, const std::string& message) {
  return MakeError(absl::StatusCode::kPermissionDenied, reason, message);
}

security::Authority::Credentials CredentialsOf(const grpc::ServerContextBase& context) {
  security::Authority::Credentials credentials;
  const auto values = context.client_metadata().equal_range(kAuthorization);
  for (auto it = values.first; it != values.second; ++it) {
    credentials.authorization.emplace_back(it->second.data(), it->second.size());
  }
  // The handshake sets it for all calls of the connection.
  const auto peer = context.auth_context();
  if (peer != nullptr && peer->IsPeerAuthenticated()) {
    const auto names = peer->FindPropertyValues(kCommonName);
    if (names.size() == 1) credentials.common_name.assign(names[0].data(), names[0].size());
  }
  return credentials;
}

// Counts adapters whose names begin with the prefix.
security::Quotas::Live CountLive(const adapter::AdapterRegistry& registry,
                                 const std::string& prefix) {
  security::Quotas::Live live;
  std::string name = prefix;
  int64_t version = -1;
  while (true) {
    const std::vector<adapter::AdapterRecord> page = registry.List("", name, version, kPage);
    for (const adapter::AdapterRecord& record : page) {
      if (record.name.compare(0, prefix.size(), prefix) != 0) return live;
      if (record.state == adapter::AdapterState::kReady ||
          record.state == adapter::AdapterState::kRetiring) {
        ++live.versions;
        live.bytes += record.summary.resident_bytes;
      }
    }
    if (page.size() < kPage) return live;
    name = page.back().name;
    version = page.back().version;
  }
}

}  // namespace

absl::StatusOr<Caller> Identify(const Services& services, const grpc::ServerContextBase& context,
                                const char* method) {
  if (services.authority == nullptr) {
    return std::make_shared<const security::Principal>(security::Anyone());
  }
  DORAD_ASSIGN_OR_RETURN(Caller caller, services.authority->Identify(CredentialsOf(context)));
  if (!caller->roles.HasAnyOf(security::RuleOf(method).any_of)) {
    return Denied("ROLE_MISSING", absl::StrCat(caller->name, " has no role for ", method));
  }
  return caller;
}

absl::Status CheckAdapterAccess(const security::Principal& caller, const std::string& name) {
  if (caller.MayTouch(name) || !adapter::IsValidAdapterName(name)) return absl::OkStatus();
  return Denied("ADAPTER_NOT_ALLOWED",
                absl::StrCat(caller.name, " may use adapters whose names begin with \"",
                             caller.adapters, "\", not \"", name, "\""));
}

absl::Status CheckIsAdmin(const security::Principal& caller) {
  if (caller.roles.Has(security::Role::kAdmin)) return absl::OkStatus();
  return Denied("ROLE_MISSING", "only an admin may do this to all adapters; name one adapter");
}

absl::Status WithoutForeignNames(const security::Principal& caller, absl::Status status) {
  const std::map<std::string, std::string> metadata = MetadataOf(status);
  const auto nearest = metadata.find("nearest");
  if (nearest == metadata.end()) return status;
  const std::vector<std::string> names = absl::StrSplit(nearest->second, ',');
  std::vector<std::string> own;
  for (const std::string& name : names) {
    if (caller.MayTouch(name)) own.push_back(name);
  }
  if (own.size() == names.size()) return status;
  // Built again from the caller's own names, so that the message does not reveal others.
  return adapter::UnknownAdapter(metadata.at("adapter"), own);
}

absl::StatusOr<PublishRoom> ReservePublish(const Services& services,
                                           const security::Principal& caller,
                                           const security::Quotas::Live& wanted) {
  if (services.authority == nullptr) return PublishRoom();
  const std::string prefix = services.authority->table()->FindTenant(caller.tenant).adapters;
  DORAD_ASSIGN_OR_RETURN(security::Quotas::Hold hold,
                         services.quotas->ReservePublish(caller.tenant, wanted, [&] {
                           return CountLive(*services.registry, prefix);
                         }));
  return std::make_shared<security::Quotas::Hold>(std::move(hold));
}

}  // namespace dorad::rpc
