// An adapter's two files from the first byte of their upload until they are loaded, for the upload
// and for calls that pass them on to other servers meanwhile.
//
// This is the one copy of the file in memory: the upload appends to it, the loader reads it, and
// other servers receive from it. After the load only the store has a durable version's file; the
// weights in the serving layout are not the file, and keeping both would double an adapter's
// memory. One writer, any number of readers; shared by them. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/platform/files/byte_buffer.h"

namespace dorad::rpc {

// Bytes of all files in memory; a stalled upload counts only its received bytes. Shared by
// UploadStore and the files. Thread-safe.
class UploadBudget {
 public:
  // make_room frees some bytes, or returns false; nullptr: it never can.
  explicit UploadBudget(int64_t max_bytes, std::function<bool()> make_room = nullptr)
      : max_bytes_(max_bytes), make_room_(std::move(make_room)) {}
  // False when there is no room.
  [[nodiscard]] bool Reserve(int64_t bytes);
  void Release(int64_t bytes);

 private:
  bool TryReserve(int64_t bytes);

  const int64_t max_bytes_;
  const std::function<bool()> make_room_;
  std::atomic<int64_t> used_{0};
};

class ArrivingFiles {
 public:
  // size: of the safetensors file.
  ArrivingFiles(std::string config_json, uint64_t size, std::shared_ptr<UploadBudget> budget);
  ~ArrivingFiles();
  ArrivingFiles(const ArrivingFiles&) = delete;
  ArrivingFiles& operator=(const ArrivingFiles&) = delete;

  const std::string& config_json() const { return config_json_; }
  uint64_t size() const { return size_; }
  // Bytes that have arrived.
  uint64_t received() const { return received_.load(std::memory_order_acquire); }

  // --- The writer.

  // RESOURCE_EXHAUSTED (PUBLISH_BUSY with a retry hint, OUT_OF_MEMORY): nothing was appended.
  // REQUIRES: at most size() bytes in all.
  absl::Status Append(std::string_view data) ABSL_LOCKS_EXCLUDED(mu_);
  // No byte follows. Readers that wait for one return.
  void End() ABSL_LOCKS_EXCLUDED(mu_);
  // REQUIRES: all bytes have arrived.
  SharedBytes image() const { return image_; }

  // --- Readers.

  // Waits until more than `offset` bytes are there, at most for so long. Returns how many are
  // there; not more than `offset`: the time is over, or no byte follows.
  uint64_t Await(uint64_t offset, absl::Duration most) const ABSL_LOCKS_EXCLUDED(mu_);
  bool ended() const ABSL_LOCKS_EXCLUDED(mu_);
  // REQUIRES: these bytes are there.
  std::string_view Bytes(uint64_t offset, uint64_t count) const;

 private:
  // Takes more of the budget, and at the first call allocates the buffer.
  absl::Status ReserveFor(uint64_t bytes);

  const std::string config_json_;
  const uint64_t size_;
  const std::shared_ptr<UploadBudget> budget_;
  // The capacity is that of the whole file before a reader hears of a byte: nothing moves.
  const std::shared_ptr<ByteBuffer> image_ = std::make_shared<ByteBuffer>();
  int64_t reserved_ = 0;  // the writer's
  std::atomic<uint64_t> received_{0};
  mutable absl::Mutex mu_;
  mutable absl::CondVar changed_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace dorad::rpc
