// Decides how much memory the server releases on a shared device: above the high water mark, enough
// to reach the low one. Between the marks nothing changes. Pure logic: no clock, no device.
// Immutable and therefore thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dorad {

class Governor {
 public:
  // Bytes in use on the device, by all processes.
  struct Marks {
    int64_t high = 0;
    int64_t low = 0;  // at most `high`
  };
  struct Snapshot {
    int64_t total = 0;          // of the device
    int64_t free = 0;           // for all processes
    int64_t pooled = 0;         // freed by this server; a trim may return it
    int64_t idle_adapters = 0;  // of weights that can be evicted
    int64_t idle_kv = 0;        // of the KV cache, in chunks that no request uses
    bool kv_wanted = false;     // requests wait for released pages
  };
  // The memory to release, in this order.
  struct Plan {
    bool trim = false;     // pooled memory; after the adapters, whose memory goes to the pool
    int64_t adapters = 0;  // bytes at least, of idle_adapters
    int64_t kv = 0;        // bytes at least, of idle_kv

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

// The part of the pooled memory that a trim may return: without the rest of the last trim, whose
// blocks are partly in use. Not thread-safe.
class TrimmablePool {
 public:
  // Trimmable bytes at `pooled` bytes in the pool.
  int64_t Trimmable(int64_t pooled) {
    left_ = std::min(left_, pooled);
    return pooled - left_;
  }
  // Notes the pooled bytes after a trim.
  void NoteTrimmed(int64_t pooled) { left_ = pooled; }

 private:
  int64_t left_ = 0;
};

}  // namespace dorad
