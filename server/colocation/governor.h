// How much memory a server gives back to a device that it shares, so that others find some: above
// the high water mark as much as it takes to come down to the low one. Between the two nothing
// moves, in either direction. Pure logic: no clock, no device. Immutable, hence thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dorad {

class Governor {
 public:
  // Bytes of the device that are in use, by whomever.
  struct Marks {
    int64_t high = 0;
    int64_t low = 0;  // at most `high`
  };
  struct Snapshot {
    int64_t total = 0;          // of the device
    int64_t free = 0;           // for anybody
    int64_t pooled = 0;         // freed by this server, and a trim may give it back
    int64_t idle_adapters = 0;  // of weights that nobody uses and that can come back
    int64_t idle_kv = 0;        // of the KV cache, in chunks that hold nothing of a request
    bool kv_wanted = false;     // requests wait for pages that the cache does not have
  };
  // What goes, in this order.
  struct Plan {
    bool trim = false;     // what is pooled; after the adapters, which end there
    int64_t adapters = 0;  // bytes at least, of idle_adapters
    int64_t kv = 0;        // likewise of idle_kv

    bool empty() const { return !trim && adapters == 0 && kv == 0; }
  };

  explicit Governor(Marks marks) : marks_(marks) {}

  Plan Decide(const Snapshot& snapshot) const;
  // Whether use is above the high mark.
  bool IsHigh(const Snapshot& snapshot) const {
    return snapshot.total - snapshot.free > marks_.high;
  }

 private:
  const Marks marks_;
};

// How much of the memory that a server has freed and kept a trim may give back: not what the last
// one left, which lies in blocks together with what is in use. Not thread-safe.
class TrimmablePool {
 public:
  // As of now, with so many bytes freed and kept.
  int64_t Trimmable(int64_t pooled) {
    left_ = std::min(left_, pooled);
    return pooled - left_;
  }
  // What a trim has left.
  void NoteTrimmed(int64_t pooled) { left_ = pooled; }

 private:
  int64_t left_ = 0;
};

}  // namespace dorad
