#include "server/engine/kv_balloon.h"

#include <vector>

#include "absl/time/time.h"
#include "server/platform/log.h"
#include "server/platform/metrics/metrics.h"

namespace dorad::engine {
namespace {

// Each try asks the driver for memory while steps wait.
constexpr absl::Duration kAskAgain = absl::Milliseconds(200);

}  // namespace

int64_t KvBalloon::Shrink(int64_t bytes, Instant now) {
  if (chunks_ == nullptr || bytes <= 0) return 0;
  const std::vector<int32_t> released = pages_.Shrink((bytes - 1) / chunks_->bytes() + 1, floor_);
  if (released.empty()) return 0;
  for (const int32_t chunk : released) chunks_->Unmap(chunk);
  next_grow_ = now + absl::ToChronoNanoseconds(shrink_hold_);
  const int64_t freed = static_cast<int64_t>(released.size()) * chunks_->bytes();
  metrics_.MemoryReleased("kv", freed);
  LogInfo("the KV cache released memory",
          {{"bytes", freed}, {"pages_released", pages_.released()}});
  return freed;
}

void KvBalloon::Grow(int64_t wanted_pages, Instant now) {
  if (pages_.released() == 0 || pages_.available() >= wanted_pages || now < next_grow_) return;
  int64_t grown = 0;
  while (pages_.released() > 0 && pages_.available() < wanted_pages) {
    const int32_t chunk = pages_.FirstReleased();
    if (!chunks_->Map(chunk).ok()) {
      next_grow_ = now + absl::ToChronoNanoseconds(kAskAgain);
      break;
    }
    pages_.Grow(chunk);
    grown += chunks_->bytes();
  }
  if (grown == 0) return;
  metrics_.KvMemoryGrown(grown);
  LogInfo("the KV cache grew", {{"bytes", grown}, {"pages_released", pages_.released()}});
}

}  // namespace dorad::engine
