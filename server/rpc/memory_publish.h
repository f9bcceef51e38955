// PublishFromMemory as the loader's inputs: every check that needs nothing but the request, the
// limits and the memory that was handed over. Pure functions, hence thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "dorad/v1/adapters.pb.h"
#include "server/adapter/loader.h"
#include "server/adapter/peer_tensors.h"
#include "server/handover/listener.h"

namespace dorad::rpc {

// A ticket's connection. `listener`: nullptr when the server has no handover socket.
// FAILED_PRECONDITION (HANDOVER_NOT_CONFIGURED), NOT_FOUND (HANDOVER_TICKET_UNKNOWN).
absl::StatusOr<std::shared_ptr<const handover::Session>> FindSession(
    const std::string& ticket, const handover::Listener* listener);

struct MemoryPublish {
  adapter::PublishOptions options;
  std::string config_json;
  adapter::PeerTensors peer;
  int64_t bytes = 0;  // of all tensors
};

// `listener`: as in FindSession. Its statuses, and INVALID_ARGUMENT with every violation
// (HANDOVER_TENSORS_INVALID, HANDOVER_TENSOR_INVALID, HANDOVER_DIGEST_INVALID, PUBLISH_CONFIG_*,
// and those of names, versions and tags).
absl::StatusOr<MemoryPublish> ParseMemoryPublish(const v1::PublishFromMemoryRequest& request,
                                                 const handover::Listener* listener);

}  // namespace dorad::rpc
