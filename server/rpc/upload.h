// The receiving side of Publish, without gRPC: takes parts and produces one complete, checked
// safetensors file in memory.
//
// Memory follows the received bytes, never the announced size; all uploads share a byte budget, and
// each takes its received bytes from it. Confined to one call at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "dorad/v1/adapters.pb.h"
#include "server/adapter/publish/publisher.h"
#include "server/platform/error.h"
#include "server/platform/files/byte_buffer.h"
#include "server/platform/files/sha256.h"
#include "server/platform/instant.h"

namespace dorad::rpc {

inline constexpr size_t kMaxChunkBytes = 1 << 20;

// Bytes of all uploads in progress or kept; a stalled upload counts only its received bytes. Shared
// by UploadStore and the uploads. Thread-safe.
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

class Upload {
 public:
  // max_bytes: of one file. has_store: durable versions are possible.
  Upload(int64_t max_bytes, bool has_store, std::shared_ptr<UploadBudget> budget)
      : max_bytes_(max_bytes), has_store_(has_store), budget_(std::move(budget)) {}
  ~Upload() { GiveBack(); }
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  // Begin, then chunks in order, then Commit. A refused chunk leaves the upload unchanged; after
  // any other failure or Commit no part may follow. INVALID_ARGUMENT (PUBLISH_*,
  // UPLOAD_ID_INVALID), FAILED_PRECONDITION (STORE_NOT_CONFIGURED), RESOURCE_EXHAUSTED
  // (PUBLISH_BUSY with a retry hint, OUT_OF_MEMORY).
  absl::Status Accept(v1::PublishRequest* part);

  bool committed() const { return state_ == State::kCommitted; }
  // Bytes received so far.
  uint64_t received() const { return image_.size(); }

  // After Commit, once.
  adapter::PublishOptions TakeOptions() { return std::move(options_); }
  std::string TakeConfig() { return std::move(config_); }
  // The request had a PeftConfig.
  bool typed_config() const { return typed_config_; }
  ByteBuffer TakeImage() { return std::move(image_); }
  // From Begin to Commit.
  absl::Duration read_time() const { return read_time_; }

 private:
  enum class State { kStart, kReceiving, kCommitted };

  absl::Status AcceptBegin(const v1::PublishBegin& begin);
  absl::Status AcceptChunk(const v1::PublishChunk& chunk);
  absl::Status AcceptCommit();
  // Takes `bytes` more of the budget, and at the first call allocates the buffer.
  absl::Status ReserveFor(size_t bytes);
  void GiveBack();

  const int64_t max_bytes_;
  const bool has_store_;
  const std::shared_ptr<UploadBudget> budget_;
  int64_t reserved_ = 0;
  State state_ = State::kStart;
  adapter::PublishOptions options_;
  std::string config_;
  bool typed_config_ = false;
  uint64_t size_ = 0;
  std::string expected_sha256_;
  Sha256 sha256_;
  ByteBuffer image_;
  Instant start_;
  absl::Duration read_time_;
};

}  // namespace dorad::rpc
