// From requests on the wire to the engine's inputs: every check that needs nothing but the request
// and the limits. Sizes are checked before anything is allocated by them, and every violation of a
// request is listed in one INVALID_ARGUMENT. Pure functions, hence thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dorad/v1/adapters.pb.h"
#include "dorad/v1/control.pb.h"
#include "dorad/v1/inference.pb.h"
#include "server/adapter/version.h"
#include "server/base/error.h"
#include "server/engine/engine.h"
#include "server/engine/types.h"

namespace dorad::rpc {

// What a request may ask for.
struct RequestLimits {
  engine::EngineLimits engine;
  // A response message that could become larger is refused beforehand.
  int64_t max_message_bytes = 64 << 20;
};

inline constexpr size_t kMaxRequestIdBytes = 128;
inline constexpr size_t kMaxCacheSaltBytes = 256;
inline constexpr int kMaxScoreAdapters = 64;
inline constexpr int64_t kMaxScoreCells = 16384;  // sequences × adapters of one Score
// All samples of a Generate may wait in memory for a client that does not read.
inline constexpr int64_t kMaxResultMessages = 16;  // times max_message_bytes
inline constexpr int kMaxAbortIds = 4096;
inline constexpr int kMaxSleepTags = 16;
inline constexpr size_t kMaxSleepTagBytes = 64;
inline constexpr size_t kMaxPathBytes = 4095;  // as the kernel's PATH_MAX
inline constexpr double kMinGpuShare = 0.01;   // as of engine.gpu_share
inline constexpr absl::Duration kMaxYieldTime = absl::Hours(24);

// What the server chooses where the request does not say.
struct RequestDefaults {
  std::string request_id;
  uint64_t seed = 0;
};

// The most bytes that a Generate or a Score has whose parts are within the limits, and a mebibyte
// for all but the tokens: most of what exceeds a limit can be told which.
int64_t MaxGenerateBytes(const RequestLimits& limits);
int64_t MaxScoreBytes(const RequestLimits& limits);

// Everything but the lease, what follows it, and the deadline.
absl::StatusOr<engine::GenerateInput> ParseGenerate(const v1::GenerateRequest& request,
                                                    const RequestLimits& limits,
                                                    RequestDefaults defaults);

struct ParsedScore {
  engine::ScoreInput input;  // without leases and deadline
  std::vector<adapter::AdapterRef> adapters;
};
absl::StatusOr<ParsedScore> ParseScore(const v1::ScoreRequest& request, const RequestLimits& limits,
                                       RequestDefaults defaults);

absl::StatusOr<engine::AbortTarget> ParseAbort(const v1::AbortRequest& request);

struct ParsedPause {
  engine::PauseMode mode = engine::PauseMode::kKeep;
  adapter::AdapterRef scope;
};
absl::StatusOr<ParsedPause> ParsePause(const v1::PauseRequest& request);

absl::StatusOr<engine::Engine::YieldOptions> ParseYield(const v1::YieldRequest& request);
absl::Status CheckYieldId(const v1::EndYieldRequest& request);

// Of Sleep and Wake, as many and as long as they can be; whoever sleeps knows their names.
// INVALID_ARGUMENT (SLEEP_TAG_INVALID).
absl::StatusOr<std::vector<std::string>> ParseSleepTags(
    const google::protobuf::RepeatedPtrField<std::string>& tags);

// "name", its version and its tags, as the Publish calls and Activate and Retire carry them.
void CheckAdapterName(const std::string& name, std::vector<Violation>* violations);
void CheckAdapterVersion(int64_t version, std::vector<Violation>* violations);
template <typename Map>  // google::protobuf::Map<string, string>
void CheckTags(const Map& tags, std::vector<Violation>* violations) {
  constexpr size_t kMaxTags = 64;
  constexpr size_t kMaxKeyBytes = 128;
  constexpr size_t kMaxValueBytes = 1024;
  if (tags.size() > kMaxTags) {
    violations->push_back({"tags", "TAGS_INVALID", "more than 64 tags"});
    return;
  }
  for (const auto& [key, value] : tags) {
    if (key.empty() || key.size() > kMaxKeyBytes || value.size() > kMaxValueBytes) {
      violations->push_back({"tags[" + key.substr(0, kMaxKeyBytes) + "]", "TAGS_INVALID",
                             "a key has 1 to 128 bytes and a value at most 1024"});
    }
  }
}

}  // namespace dorad::rpc
