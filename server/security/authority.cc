#include "server/security/authority.h"

#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "server/base/error.h"
#include "server/base/log.h"

namespace dorad::security {
namespace {

absl::Status Unauthenticated(const char* reason, const char* message) {
  return MakeError(absl::StatusCode::kUnauthenticated, reason, message);
}

// What follows "Bearer "; empty when it is something else.
std::string_view BearerOf(const std::string& value) {
  constexpr absl::string_view kScheme = "bearer ";
  if (!absl::StartsWithIgnoreCase(value, kScheme)) return {};
  return std::string_view(value).substr(kScheme.size());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Authority>> Authority::Open(const std::string& path,
                                                           std::function<void()> on_failure) {
  std::unique_ptr<Authority> authority(new Authority(path, std::move(on_failure)));
  absl::MutexLock reading(&authority->reading_);
  DORAD_RETURN_IF_ERROR(authority->Take(authority->file_.Read()));
  return authority;
}

Authority::Authority(std::string path, std::function<void()> on_failure)
    : path_(std::move(path)), on_failure_(std::move(on_failure)), file_({path_}) {}

absl::StatusOr<std::shared_ptr<const Principal>> Authority::Identify(
    const Credentials& credentials) const {
  const std::shared_ptr<const TokenTable> table = this->table();
  if (credentials.authorization.empty()) {
    if (!credentials.common_name.empty()) {
      if (auto principal = table->FindCertificate(credentials.common_name)) return principal;
    }
    return Unauthenticated("TOKEN_MISSING",
                           "the call brings no token: send \"authorization: Bearer TOKEN\"");
  }
  // Of several values one could be a proxy's and one the caller's: nobody can tell.
  if (credentials.authorization.size() > 1) {
    return Unauthenticated("TOKEN_INVALID", "the call brings more than one authorization");
  }
  const std::string_view token = BearerOf(credentials.authorization.front());
  if (!token.empty()) {
    if (auto principal = table->FindToken(token)) return principal;
  }
  return Unauthenticated("TOKEN_INVALID", "the token is not one of this server's");
}

std::shared_ptr<const TokenTable> Authority::table() const {
  absl::MutexLock lock(&mu_);
  return table_;
}

void Authority::Poll() {
  absl::MutexLock reading(&reading_);
  if (const auto texts = file_.Look()) Take(*texts).IgnoreError();
}

absl::Status Authority::Reload() {
  absl::MutexLock reading(&reading_);
  return Take(file_.Read());
}

absl::Status Authority::Take(const absl::StatusOr<SettledFiles::Texts>& texts) {
  absl::StatusOr<std::shared_ptr<const TokenTable>> table;
  if (texts.ok()) {
    table = TokenTable::Parse(texts->front(), path_);
  } else {
    table = texts.status();
  }
  if (!table.ok()) {
    LogError("the tokens file cannot be used", {{"path", path_},
                                                {"reason", ReasonOf(table.status())},
                                                {"error", std::string(table.status().message())}});
    if (on_failure_) on_failure_();
    return table.status();
  }
  LogInfo("tokens loaded", {{"path", path_},
                            {"tokens", static_cast<int64_t>((*table)->num_tokens())},
                            {"certificates", static_cast<int64_t>((*table)->num_certificates())}});
  absl::MutexLock lock(&mu_);
  table_ = *std::move(table);
  return absl::OkStatus();
}

}  // namespace dorad::security
