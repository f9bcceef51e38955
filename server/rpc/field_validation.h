// Checks of fields that several requests have. Each adds its problems to `violations`, and checks
// sizes before allocations. Pure functions and therefore thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "server/adapter/registry/version.h"
#include "server/engine/types.h"
#include "server/platform/error.h"

namespace dorad::rpc {

using Violations = std::vector<Violation>;

inline constexpr int64_t kIdBytes = sizeof(int32_t);

inline void Add(Violations* to, std::string field, const char* reason, std::string description) {
  to->push_back({std::move(field), reason, std::move(description)});
}

// "VALUE is not in RANGE".
std::string FloatRange(const char* range, float value);

// The token ids in all of a request's TokenSequences.
template <typename Sequences>
int64_t CountTokens(const Sequences& sequences) {
  int64_t bytes = 0;
  for (const auto& sequence : sequences) {
    bytes += static_cast<int64_t>(sequence.token_ids().size());
  }
  return bytes / kIdBytes;
}

// The ids of a bytes field, or nothing when its length is wrong or above max_ids.
std::vector<int32_t> ReadIds(const std::string& field, const std::string& bytes, int64_t max_ids,
                             const char* too_many_reason, int32_t vocab_size,
                             Violations* violations);

// Refuses the placeholders of images in a prompt.
void CheckNoImages(const std::string& field, const std::vector<int32_t>& ids,
                   const engine::EngineLimits& limits, Violations* violations);

// A caller's id: 1 to kMaxRequestIdBytes printable characters.
void CheckId(const char* field, const char* reason, const std::string& id, Violations* violations);

// The optional request_id of a request.
template <typename Request>
std::string ReadRequestId(const Request& request, std::string fallback, Violations* violations) {
  if (!request.has_request_id()) return fallback;
  CheckId("request_id", "REQUEST_ID_INVALID", request.request_id(), violations);
  return request.request_id();
}

adapter::AdapterRef ReadAdapter(const std::string& field, const std::string& text,
                                Violations* violations);

int32_t ReadTopLogprobs(const std::string& field, uint32_t k, const engine::EngineLimits& limits,
                        Violations* violations);

// Bytes of one position of a response: id, log-probability, top k, chosen.
int64_t BytesPerToken(int32_t top_k, size_t chosen_ids);

// Whether a response fits into a message. cells: of a Score, 0 for a Generate.
void CheckResponseSize(const std::string& field, int64_t tokens, int64_t cells,
                       int64_t bytes_per_token, int64_t max_message_bytes, Violations* violations);

}  // namespace dorad::rpc
