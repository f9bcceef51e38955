// The receiving side of Publish, without gRPC: takes parts and produces one complete, checked
// safetensors file in memory.
//
// Memory follows the received bytes, never the announced size; all uploads share a byte budget, and
// each takes its received bytes from it. Confined to one call at a time.
#pragma once

#include <cstddef>
#include <cstdint>
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
#include "server/rpc/arriving_files.h"

namespace dorad::rpc {

inline constexpr size_t kMaxChunkBytes = 1 << 20;

class Upload {
 public:
  // max_bytes: of one file. has_store: durable versions are possible.
  Upload(int64_t max_bytes, bool has_store, std::shared_ptr<UploadBudget> budget)
      : max_bytes_(max_bytes), has_store_(has_store), budget_(std::move(budget)) {}
  ~Upload() {
    if (files_ != nullptr) files_->End();
  }
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  // Begin, then chunks in order, then Commit. A refused chunk leaves the upload unchanged; after
  // any other failure or Commit no part may follow. INVALID_ARGUMENT (PUBLISH_*,
  // UPLOAD_ID_INVALID), FAILED_PRECONDITION (STORE_NOT_CONFIGURED), RESOURCE_EXHAUSTED
  // (PUBLISH_BUSY with a retry hint, OUT_OF_MEMORY).
  absl::Status Accept(v1::PublishRequest* part);

  bool committed() const { return state_ == State::kCommitted; }
  // Bytes received so far.
  uint64_t received() const { return files_ == nullptr ? 0 : files_->received(); }
  // From Begin on: for calls that pass the files on to other servers.
  const std::shared_ptr<ArrivingFiles>& files() const { return files_; }

  // After Commit, once.
  adapter::PublishOptions TakeOptions() { return std::move(options_); }
  const std::string& config() const { return files_->config_json(); }
  // The request had a PeftConfig.
  bool typed_config() const { return typed_config_; }
  // The upload, too, keeps it until the load has ended: other servers may still want it.
  SharedBytes image() const { return files_->image(); }
  // From Begin to Commit.
  absl::Duration read_time() const { return read_time_; }

 private:
  enum class State { kStart, kReceiving, kCommitted };

  absl::Status AcceptBegin(const v1::PublishBegin& begin);
  absl::Status AcceptChunk(const v1::PublishChunk& chunk);
  absl::Status AcceptCommit();
  const int64_t max_bytes_;
  const bool has_store_;
  const std::shared_ptr<UploadBudget> budget_;
  State state_ = State::kStart;
  adapter::PublishOptions options_;
  bool typed_config_ = false;
  std::string expected_sha256_;
  Sha256 sha256_;
  std::shared_ptr<ArrivingFiles> files_;
  Instant start_;
  absl::Duration read_time_;
};

}  // namespace dorad::rpc
