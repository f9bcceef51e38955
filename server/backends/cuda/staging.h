// Host data on its way to the device, in pieces: a few threads copy them into page-locked buffers
// while earlier pieces are on their way. What is page-locked already goes straight.
//
// Only a few pieces are given to the copy engine at a time: it serves its queue in order, and the
// few bytes that a decode step uploads must not wait behind gigabytes. Pinning is slow (0.3 s a
// GiB): the buffers are made once and used for everything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/backends/cuda/device.h"
#include "server/platform/thread_pool.h"

namespace dorad::cuda {

// Thread-safe.
class Uploader {
 public:
  struct Options {
    int threads = 4;
    int64_t piece_bytes = 2 << 20;
    int window = 16;  // pieces that the copy engine has at a time
  };
  // threads: one for each two cores, up to what a GPU's link can use.
  static Options DefaultOptions();

  static absl::StatusOr<std::unique_ptr<Uploader>> Create(const Options& options);
  // Waits for what is under way.
  ~Uploader();

  struct Copy {
    const void* from = nullptr;  // host
    void* to = nullptr;          // device
    int64_t bytes = 0;
  };
  class Batch;  // copies that were started together
  // Begins copies, which run in no particular order. Returns at once. pinned: the sources are
  // page-locked, and stay until the stream's work is done.
  std::shared_ptr<Batch> Start(absl::Span<const Copy> copies, bool pinned);
  // Waits until all of the batch is on its way: it is in order with what stream() is given next,
  // and sources that are not page-locked may go.
  absl::Status Wait(const Batch& batch);

  // What the copies run on.
  const Stream& stream() const { return stream_; }

 private:
  struct Buffer {
    Buffer(PinnedBuffer pinned, Event event)
        : memory(std::move(pinned)), copied(std::move(event)) {}
    PinnedBuffer memory;
    Event copied;  // goes first, and waits for the last copy from `memory`
  };

  Uploader(const Options& options, Stream stream);
  absl::Status AllocateAll();
  absl::Status Bring(const Copy& piece, bool pinned);
  // Hands one piece to the copy engine. `copied`, where there is one, is recorded behind it.
  absl::Status Send(const Copy& piece, const Event* copied);

  const Options options_;
  const Stream stream_;
  absl::Mutex mu_;
  // Least recently used first. A list: to take one and to give it back needs no memory, so no
  // buffer is lost to an exception.
  std::list<Buffer> free_ ABSL_GUARDED_BY(mu_);
  absl::Mutex send_mu_;
  std::vector<Event> window_ ABSL_GUARDED_BY(send_mu_);
  int64_t sent_ ABSL_GUARDED_BY(send_mu_) = 0;
  ThreadPool pool_;  // ends first
};

}  // namespace dorad::cuda
