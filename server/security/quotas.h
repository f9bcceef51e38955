// What each tenant uses now, held to its quota.
//
// Streams and publishes are held by objects that give them back exactly once, however a call ends.
// Tokens are a bucket of one minute's worth: a request is let in while something is left, and what
// it then takes may leave a debt, which later requests wait for. So no running stream is cut short,
// and over any time a tenant gets its rate and what its last requests overdrew. Owned by App,
// outlives the engine. Thread-safe.
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
  // quota_of: the one in effect for a tenant, asked at each use.
  explicit Quotas(std::function<Quota(const std::string& tenant)> quota_of,
                  std::function<absl::Time()> now = absl::Now)
      : quota_of_(std::move(quota_of)), now_(std::move(now)) {}

  // Something that is in use until the object ends. Move-only; belongs to one thread at a time.
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

  // Takes the tokens, if anything is left. RESOURCE_EXHAUSTED (QUOTA_TOKENS) with the time until
  // there is.
  absl::Status AdmitTokens(const std::string& tenant, int64_t tokens) ABSL_LOCKS_EXCLUDED(mu_);
  // Takes them, whatever is left. Negative: gives them back.
  void TakeTokens(const std::string& tenant, int64_t tokens) ABSL_LOCKS_EXCLUDED(mu_);

  // Versions that can be used or are used still, and their bytes.
  struct Live {
    int64_t versions = 0;
    int64_t bytes = 0;
  };
  // Room for one more version of `bytes` bytes beside those that live() finds and those that are on
  // their way; held until it is live or has failed. live runs under a lock of publishes.
  // RESOURCE_EXHAUSTED (QUOTA_ADAPTERS, QUOTA_BYTES).
  absl::StatusOr<Hold> ReservePublish(const std::string& tenant, int64_t bytes,
                                      const std::function<Live()>& live)
      ABSL_LOCKS_EXCLUDED(publishing_);

  struct Use {
    int64_t streams = 0;
    Live on_their_way;
    double tokens_left = 0;  // negative: a debt
  };
  Use use(const std::string& tenant) ABSL_LOCKS_EXCLUDED(mu_, publishing_);

 private:
  struct Account {
    int64_t streams = 0;
    double tokens = 0;
    absl::Time filled = absl::InfinitePast();  // when tokens was right
  };
  // The account, its bucket filled up to now.
  Account& Filled(const std::string& tenant, const Quota& quota) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::function<Quota(const std::string&)> quota_of_;
  const std::function<absl::Time()> now_;
  absl::Mutex mu_;  // the engine takes it in each step: never held for long
  std::map<std::string, Account> accounts_ ABSL_GUARDED_BY(mu_);  // tenants of the tokens file
  absl::Mutex publishing_;
  std::map<std::string, Live> on_their_way_ ABSL_GUARDED_BY(publishing_);  // likewise
};

}  // namespace dorad::security
