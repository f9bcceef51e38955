// Validates requests and converts them to the engine's inputs: all checks of the request and the
// limits (publish_validation.h: of the Publish calls). Sizes are checked before allocations, and
// one INVALID_ARGUMENT lists every violation of a request. Pure functions and therefore
// thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dorad/v1/control.pb.h"
#include "dorad/v1/inference.pb.h"
#include "server/adapter/registry/version.h"
#include "server/colocation/listener.h"
#include "server/engine/engine.h"
#include "server/engine/types.h"

namespace dorad::rpc {

// The limits of requests.
struct RequestLimits {
  engine::EngineLimits engine;
  // A request whose response could be larger is refused.
  int64_t max_message_bytes = 64 << 20;
};

// Limit of a request without its tokens; more than the largest Score needs.
inline constexpr int64_t kMaxRequestFraming = 1 << 20;
inline constexpr size_t kMaxRequestIdBytes = 128;
inline constexpr size_t kMaxCacheSaltBytes = 256;
inline constexpr int kMaxScoreAdapters = 64;
inline constexpr int64_t kMaxScoreCells = 16384;  // sequences × adapters of one Score
// All samples of a Generate may wait in memory for a client that does not read.
inline constexpr int64_t kMaxResultMessages = 16;  // times max_message_bytes
inline constexpr int kMaxAbortIds = 4096;
inline constexpr int kMaxSleepTags = 16;
inline constexpr size_t kMaxSleepTagBytes = 64;
inline constexpr double kMinGpuShare = 0.01;  // as of engine.gpu_share
inline constexpr absl::Duration kMaxGpuShareTime = absl::Hours(24);

// The server's choices for optional fields.
struct RequestDefaults {
  std::string request_id;
  uint64_t seed = 0;
};

// Upper bound of a valid request: the bytes of its tokens plus kMaxRequestFraming. Slightly larger
// ones still parse, so that errors can name the field.
int64_t MaxGenerateBytes(const RequestLimits& limits);
int64_t MaxScoreBytes(const RequestLimits& limits);

// The input without its lease, `follow` and deadline. `listener`, here and below: of pixels in
// shared memory; nullptr without a socket.
absl::StatusOr<engine::GenerateInput> ParseGenerate(
    const v1::GenerateRequest& request, const RequestLimits& limits, RequestDefaults defaults,
    const shared_memory::Listener* listener = nullptr);

struct ParsedScore {
  engine::ScoreInput input;  // without leases and deadline
  std::vector<adapter::AdapterRef> adapters;
};
absl::StatusOr<ParsedScore> ParseScore(const v1::ScoreRequest& request, const RequestLimits& limits,
                                       RequestDefaults defaults,
                                       const shared_memory::Listener* listener = nullptr);

absl::StatusOr<engine::AbortTarget> ParseAbort(const v1::AbortRequest& request);

struct ParsedPause {
  engine::PauseMode mode = engine::PauseMode::kKeep;
  adapter::AdapterRef scope;
};
absl::StatusOr<ParsedPause> ParsePause(const v1::PauseRequest& request);

absl::StatusOr<engine::Engine::GpuShareLimit> ParseGpuShareLimit(
    const v1::LimitGpuShareRequest& request);
absl::Status CheckLimitId(const v1::EndGpuShareLimitRequest& request);

// Tags of Sleep and Wake. Checks only their number and lengths: SleepControl checks the names.
// INVALID_ARGUMENT (SLEEP_TAG_INVALID).
absl::StatusOr<std::vector<std::string>> ParseSleepTags(
    const google::protobuf::RepeatedPtrField<std::string>& tags);

}  // namespace dorad::rpc
