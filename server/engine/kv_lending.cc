#include "server/engine/kv_lending.h"

#include <vector>

#include "absl/time/time.h"
#include "server/base/log.h"
#include "server/base/metrics.h"

namespace dorad::engine {
namespace {

// The question goes to the driver, while steps wait.
constexpr absl::Duration kAskAgain = absl::Milliseconds(200);

}  // namespace

int64_t KvLending::Lend(int64_t bytes, Instant now) {
  if (chunks_ == nullptr || bytes <= 0) return 0;
  const std::vector<int32_t> lent = pages_.Lend((bytes - 1) / chunks_->bytes() + 1, floor_);
  if (lent.empty()) return 0;
  for (const int32_t chunk : lent) chunks_->Unmap(chunk);
  next_take_ = now + absl::ToChronoNanoseconds(least_loan_);
  const int64_t freed = static_cast<int64_t>(lent.size()) * chunks_->bytes();
  metrics_.MemoryGivenBack("kv", freed);
  LogInfo("the KV cache lends memory", {{"bytes", freed}, {"pages_lent", pages_.lent()}});
  return freed;
}

void KvLending::TakeBack(int64_t wanted_pages, Instant now) {
  if (pages_.lent() == 0 || pages_.available() >= wanted_pages || now < next_take_) return;
  int64_t taken = 0;
  while (pages_.lent() > 0 && pages_.available() < wanted_pages) {
    const int32_t chunk = pages_.FirstLent();
    if (!chunks_->Map(chunk).ok()) {
      next_take_ = now + absl::ToChronoNanoseconds(kAskAgain);
      break;
    }
    pages_.TakeBack(chunk);
    taken += chunks_->bytes();
  }
  if (taken == 0) return;
  metrics_.KvMemoryTakenBack(taken);
  LogInfo("the KV cache takes memory back", {{"bytes", taken}, {"pages_lent", pages_.lent()}});
}

}  // namespace dorad::engine
