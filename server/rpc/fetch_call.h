// One FetchAdapter call: sends a version's files to another server, from the one place that has
// them. While they arrive and are loaded that is the upload's own memory, so that a chain of
// servers receives at the rate of one connection; afterwards it is the store of durable versions.
//
// A thread of Peers waits for bytes and paces them; the call writes them. At most two chunks are in
// memory. Lifetime and thread-safety as Call.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dorad/v1/adapters.pb.h"
#include "server/platform/instant.h"
#include "server/rpc/server_stream_call.h"

namespace dorad::rpc {

class FetchCall final : public ServerStreamCall {
 public:
  using ServerStreamCall::ServerStreamCall;

 private:
  absl::Status OnMessage(grpc::ByteBuffer* bytes) override;
  Turn Next() override;

  // On the transfer's thread. OK: all is sent, or the call is over.
  absl::Status Send() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status SendArriving(const ArrivingFiles& files) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status SendStored(const std::string& folder) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until the message before is written. False: the call is over.
  bool Hand(v1::FetchAdapterResponse message) ABSL_LOCKS_EXCLUDED(mu_);
  bool HandConfig(const std::string& config_json) ABSL_LOCKS_EXCLUDED(mu_);
  // The bytes at offset_, which moves past them.
  bool HandChunk(std::string data) ABSL_LOCKS_EXCLUDED(mu_);
  bool over() ABSL_LOCKS_EXCLUDED(mu_);

  v1::FetchAdapterRequest request_;  // set by OnMessage, then used by the transfer
  uint64_t offset_ = 0;              // of the next byte to send; the transfer's
  std::optional<v1::FetchAdapterResponse> next_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mu_);
  v1::FetchAdapterResponse response_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::rpc
