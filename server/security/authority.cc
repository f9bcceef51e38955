#include "server/security/authority.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "server/platform/error.h"
#include "server/platform/log.h"

namespace dorad::security {
namespace {

absl::Status Unauthenticated(const char* reason, const char* message) {
  return MakeError(absl::StatusCode::kUnauthenticated, reason, message);
}

// The text after "Bearer "; empty for any other value.
std::string_view BearerOf(const std::string& value) {
  constexpr absl::string_view kScheme = "bearer ";
  if (!absl::StartsWithIgnoreCase(value, kScheme)) return {};
  return std::string_view(value).substr(kScheme.size());
}

}  // namespace

absl::Status Authority::Check(const std::string& path) {
  DORAD_ASSIGN_OR_RETURN(const FileWatcher::Texts texts, FileWatcher({path}).Read());
  return TokenTable::Parse(texts.front(), path).status();
}

absl::StatusOr<std::unique_ptr<Authority>> Authority::Open(const std::string& path,
                                                           std::function<void()> on_failure) {
  std::unique_ptr<Authority> authority(new Authority(path, std::move(on_failure)));
  DORAD_RETURN_IF_ERROR(authority->Reload());
  return authority;
}

Authority::Authority(const std::string& path, std::function<void()> on_failure)
    : table_(
          {path},
          [path](const FileWatcher::Texts& texts)
              -> absl::StatusOr<std::shared_ptr<const TokenTable>> {
            DORAD_ASSIGN_OR_RETURN(std::shared_ptr<const TokenTable> table,
                                   TokenTable::Parse(texts.front(), path));
            LogInfo("tokens loaded",
                    {{"path", path},
                     {"tokens", static_cast<int64_t>(table->num_tokens())},
                     {"certificates", static_cast<int64_t>(table->num_certificates())}});
            return table;
          },
          [path, on_failure = std::move(on_failure)](const absl::Status& status) {
            LogError("the tokens file cannot be used", {{"path", path},
                                                        {"reason", ReasonOf(status)},
                                                        {"error", std::string(status.message())}});
            if (on_failure) on_failure();
          },
          [this] { subscribers_.Notify(); }) {}

absl::StatusOr<std::shared_ptr<const Principal>> Authority::Identify(
    const Credentials& credentials) const {
  const std::shared_ptr<const TokenTable> table = this->table();
  if (credentials.authorization.empty()) {
    if (!credentials.common_name.empty()) {
      if (auto principal = table->FindCertificate(credentials.common_name)) return principal;
    }
    return Unauthenticated("TOKEN_MISSING",
                           "the call has no token: send \"authorization: Bearer TOKEN\"");
  }
  // With several values it is unclear which one is the caller's and which a proxy's.
  if (credentials.authorization.size() > 1) {
    return Unauthenticated("TOKEN_INVALID", "the call has more than one authorization");
  }
  const std::string_view token = BearerOf(credentials.authorization.front());
  if (!token.empty()) {
    if (auto principal = table->FindToken(token)) return principal;
  }
  return Unauthenticated("TOKEN_INVALID", "the server does not know this token");
}

}  // namespace dorad::security
