#include "server/security/quotas.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/platform/error.h"

namespace dorad::security {
namespace {

// A stream may end at any time; a much earlier retry only adds load.
constexpr absl::Duration kRetryStream = absl::Milliseconds(200);
constexpr absl::Duration kShortestWait = absl::Milliseconds(1);

absl::Status Exhausted(const char* reason, const std::string& message) {
  return MakeError(absl::StatusCode::kResourceExhausted, reason, message);
}

}  // namespace

Quotas::Account& Quotas::Filled(const std::string& tenant, const Quota& quota) {
  Account& account = accounts_[tenant];
  const auto most = static_cast<double>(quota.tokens_per_minute);
  const absl::Time now = now_();
  // A clock that was set back adds no tokens.
  const double minutes = std::max(0.0, absl::FDivDuration(now - account.filled, absl::Minutes(1)));
  // A new account is full; at most a minute's tokens are saved up.
  account.tokens = std::min(most, account.tokens + minutes * most);
  account.filled = now;
  return account;
}

absl::StatusOr<Quotas::Hold> Quotas::OpenStream(const std::string& tenant) {
  const Quota quota = quota_of_(tenant);
  absl::MutexLock lock(&mu_);
  Account& account = accounts_[tenant];
  if (quota.streams > 0 && account.streams >= quota.streams) {
    return WithRetryAfter(
        Exhausted("QUOTA_STREAMS", absl::StrCat("the tenant has ", account.streams,
                                                " streams, and may have ", quota.streams)),
        kRetryStream);
  }
  ++account.streams;
  return Hold([this, tenant] {
    absl::MutexLock lock(&mu_);
    --accounts_[tenant].streams;
  });
}

absl::Status Quotas::AdmitTokens(const std::string& tenant, int64_t tokens) {
  const Quota quota = quota_of_(tenant);
  if (quota.tokens_per_minute == 0) return absl::OkStatus();
  absl::MutexLock lock(&mu_);
  Account& account = Filled(tenant, quota);
  if (account.tokens <= 0) {
    const absl::Duration wait =
        absl::Minutes(1) * (-account.tokens / static_cast<double>(quota.tokens_per_minute));
    return WithRetryAfter(
        Exhausted("QUOTA_TOKENS", absl::StrCat("the tenant has used up its ",
                                               quota.tokens_per_minute, " tokens per minute")),
        std::max(wait, kShortestWait));
  }
  account.tokens -= static_cast<double>(tokens);
  return absl::OkStatus();
}

void Quotas::TakeTokens(const std::string& tenant, int64_t tokens) {
  const Quota quota = quota_of_(tenant);
  if (quota.tokens_per_minute == 0) return;
  absl::MutexLock lock(&mu_);
  Filled(tenant, quota).tokens -= static_cast<double>(tokens);
}

absl::StatusOr<Quotas::Hold> Quotas::ReservePublish(const std::string& tenant, const Live& wanted,
                                                    const std::function<Live()>& live) {
  const Quota quota = quota_of_(tenant);
  if (quota.adapters == 0 && quota.bytes == 0) return Hold();
  absl::MutexLock lock(&publishing_);
  Live& pending = pending_[tenant];
  const Live used = live();
  const int64_t versions = used.versions + pending.versions;
  const int64_t held = used.bytes + pending.bytes;
  if (quota.adapters > 0 && wanted.versions > 0 && wanted.versions > quota.adapters - versions) {
    return Exhausted("QUOTA_ADAPTERS",
                     absl::StrCat("the tenant has ", versions, " adapter versions, and may have ",
                                  quota.adapters, "; retire some"));
  }
  if (quota.bytes > 0 && wanted.bytes > quota.bytes - held) {
    return Exhausted("QUOTA_BYTES",
                     absl::StrCat("the tenant's adapters have ", held, " bytes and this one ",
                                  wanted.bytes, "; they may have ", quota.bytes));
  }
  pending.versions += wanted.versions;
  pending.bytes += wanted.bytes;
  return Hold([this, tenant, wanted] {
    absl::MutexLock lock(&publishing_);
    Live& pending = pending_[tenant];
    pending.versions -= wanted.versions;
    pending.bytes -= wanted.bytes;
  });
}

Quotas::Use Quotas::use(const std::string& tenant) {
  const Quota quota = quota_of_(tenant);
  Use use;
  {
    absl::MutexLock lock(&publishing_);
    use.pending = pending_[tenant];
  }
  absl::MutexLock lock(&mu_);
  const Account& account = Filled(tenant, quota);
  use.streams = account.streams;
  use.tokens_left = account.tokens;
  return use;
}

}  // namespace dorad::security
