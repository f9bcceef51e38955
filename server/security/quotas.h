// Each tenant's current use, and its limits.
//
// Streams and publishes are held by objects that release them exactly once, however a call ends.
// Tokens are a bucket of one minute's worth: a request is admitted while the bucket is not empty,
// and may leave a debt that later requests wait for. So no running stream is cut short, and over
// time a tenant gets its rate plus the overdraft of its last requests. Owned by App, outlives the
// engine. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/security/token_table.h"

namespace dorad::security {

class Quotas {
 public:
  // quota_of: returns a tenant's current quota; called at each use.
  explicit Quotas(std::function<Quota(const std::string& tenant)> quota_of,
                  std::function<absl::Time()> now = absl::Now)
      : quota_of_(std::move(quota_of)), now_(std::move(now)) {}

  // A resource in use until the object ends. Move-only; belongs to one thread at a time.
  class Hold {
   public:
    Hold() = default;
    explicit Hold(std::function<void()> give_back) : give_back_(std::move(give_back)) {}
    Hold(Hold&& other) noexcept : give_back_(std::exchange(other.give_back_, nullptr)) {}
    Hold& operator=(Hold&& other) noexcept {
      if (this != &other) {
        Release();
        give_back_ = std::exchange(other.give_back_, nullptr);
      }
      return *this;
    }
    ~Hold() { Release(); }
    void Release() {
      if (const auto give_back = std::exchange(give_back_, nullptr)) give_back();
    }

   private:
    std::function<void()> give_back_;
  };

  // RESOURCE_EXHAUSTED (QUOTA_STREAMS) with a retry hint.
  absl::StatusOr<Hold> OpenStream(const std::string& tenant) ABSL_LOCKS_EXCLUDED(mu_);

  // Takes the tokens unless the bucket is empty. RESOURCE_EXHAUSTED (QUOTA_TOKENS) with the time
  // until it is not.
  absl::Status AdmitTokens(const std::string& tenant, int64_t tokens) ABSL_LOCKS_EXCLUDED(mu_);
  // Takes the tokens even from an empty bucket. Negative: returns them.
  void TakeTokens(const std::string& tenant, int64_t tokens) ABSL_LOCKS_EXCLUDED(mu_);

  // Versions that are ready or retiring, and their bytes.
  struct Live {
    int64_t versions = 0;
    int64_t bytes = 0;
  };
  // Reserves room for `wanted` beside live() and pending publishes; held until it is live or has
  // failed. live runs under the lock of publishes. RESOURCE_EXHAUSTED (QUOTA_ADAPTERS,
  // QUOTA_BYTES).
  absl::StatusOr<Hold> ReservePublish(const std::string& tenant, const Live& wanted,
                                      const std::function<Live()>& live)
      ABSL_LOCKS_EXCLUDED(publishing_);

  struct Use {
    int64_t streams = 0;
    Live pending;
    double tokens_left = 0;  // negative: a debt
  };
  Use use(const std::string& tenant) ABSL_LOCKS_EXCLUDED(mu_, publishing_);

 private:
  struct Account {
    int64_t streams = 0;
    double tokens = 0;
    absl::Time filled = absl::InfinitePast();  // time of `tokens`
  };
  // The account with its bucket filled up to now.
  Account& Filled(const std::string& tenant, const Quota& quota) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::function<Quota(const std::string&)> quota_of_;
  const std::function<absl::Time()> now_;
  absl::Mutex mu_;  // the engine takes it in each step: never held for long
  std::map<std::string, Account> accounts_ ABSL_GUARDED_BY(mu_);  // tenants of the tokens file
  absl::Mutex publishing_;
  std::map<std::string, Live> pending_ ABSL_GUARDED_BY(publishing_);  // by tenant
};

}  // namespace dorad::security
