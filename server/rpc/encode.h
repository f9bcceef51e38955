// Converts values of the engine and the registry to wire messages. Pure functions and therefore
// thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "dorad/v1/adapters.pb.h"
#include "dorad/v1/inference.pb.h"
#include "dorad/v1/types.pb.h"
#include "server/adapter/registry/registry.h"
#include "server/engine/types.h"

namespace dorad::rpc {

// Common fields of all messages of one generation.
struct GenerateHeader {
  std::string request_id;
  uint64_t seed = 0;
  int32_t top_logprobs = 0;  // k
};
void Encode(const GenerateHeader& header, const engine::SampleDelta& delta,
            v1::GenerateResponse* to);

void Encode(const std::string& request_id, int32_t top_logprobs, const engine::ScoreResult& result,
            v1::ScoreResponse* to);

void Encode(const adapter::AdapterRecord& record, v1::AdapterVersion* to);

void Encode(const adapter::RegistryEvent& event, v1::WatchResponse* to);

void EncodeDuration(absl::Duration duration, google::protobuf::Duration* to);

}  // namespace dorad::rpc
