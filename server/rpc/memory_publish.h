// PublishFromMemory as the loader's inputs: all checks of the request, the limits and the
// registered memory. Pure functions and therefore thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "dorad/v1/adapters.pb.h"
#include "server/adapter/peft/peer_tensors.h"
#include "server/adapter/publish/publisher.h"
#include "server/colocation/listener.h"

namespace dorad::rpc {

// The connection of a session_token. `listener`: nullptr without a shared-memory socket.
// FAILED_PRECONDITION (SHARED_MEMORY_NOT_CONFIGURED), NOT_FOUND (SHARED_MEMORY_SESSION_UNKNOWN).
absl::StatusOr<std::shared_ptr<const shared_memory::Session>> FindSession(
    const std::string& session_token, const shared_memory::Listener* listener);

struct MemoryPublish {
  adapter::PublishOptions options;
  std::string config_json;
  adapter::PeerTensors peer;
  int64_t bytes = 0;  // of all tensors
};

// `listener`: as in FindSession. Its statuses, and INVALID_ARGUMENT with every violation
// (SHARED_MEMORY_TENSORS_INVALID, SHARED_MEMORY_TENSOR_INVALID, SHARED_MEMORY_DIGEST_INVALID,
// PUBLISH_CONFIG_*, and those of names, versions and tags).
absl::StatusOr<MemoryPublish> ParseMemoryPublish(const v1::PublishFromMemoryRequest& request,
                                                 const shared_memory::Listener* listener);

}  // namespace dorad::rpc
