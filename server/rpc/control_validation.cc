#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc/field_validation.h"
#include "server/rpc/request_validation.h"

namespace dorad::rpc {

absl::StatusOr<engine::AbortTarget> ParseAbort(const v1::AbortRequest& request) {
  Violations violations;
  engine::AbortTarget target;
  switch (request.target_case()) {
    case v1::AbortRequest::kRequests: {
      const auto& ids = request.requests().request_ids();
      if (ids.empty() || ids.size() > kMaxAbortIds) {
        Add(&violations, "requests.request_ids", "ABORT_TARGET_INVALID",
            absl::StrCat(ids.size(), " ids are not in [1, ", kMaxAbortIds, "]"));
      } else if (std::any_of(ids.begin(), ids.end(), [](const std::string& id) {
                   return id.size() > kMaxRequestIdBytes;
                 })) {
        Add(&violations, "requests.request_ids", "ABORT_TARGET_INVALID",
            absl::StrCat("an id has at most ", kMaxRequestIdBytes, " bytes"));
      } else {
        target.request_ids.assign(ids.begin(), ids.end());
      }
      break;
    }
    case v1::AbortRequest::kAdapter:
      target.adapter = ReadAdapter("adapter", request.adapter(), &violations);
      if (request.adapter().empty()) {
        Add(&violations, "adapter", "ABORT_TARGET_INVALID", "the base model is no adapter");
      }
      break;
    case v1::AbortRequest::kAll:
      target.all = request.all();
      if (!target.all) Add(&violations, "all", "ABORT_TARGET_INVALID", "must be true");
      break;
    case v1::AbortRequest::TARGET_NOT_SET:
      Add(&violations, "target", "ABORT_TARGET_INVALID", "say requests, adapter or all");
  }
  if (!violations.empty()) return MakeInvalid("AbortRequest", std::move(violations));
  return target;
}

absl::StatusOr<ParsedPause> ParsePause(const v1::PauseRequest& request) {
  Violations violations;
  ParsedPause parsed;
  switch (request.mode()) {
    case v1::PAUSE_MODE_ABORT:
      parsed.mode = engine::PauseMode::kAbort;
      break;
    case v1::PAUSE_MODE_WAIT:
      parsed.mode = engine::PauseMode::kWait;
      break;
    case v1::PAUSE_MODE_UNSPECIFIED:
    case v1::PAUSE_MODE_KEEP:
      break;
    default:
      Add(&violations, "mode", "PAUSE_MODE_INVALID",
          absl::StrCat("unknown mode ", static_cast<int>(request.mode())));
  }
  parsed.scope = ReadAdapter("adapter", request.adapter(), &violations);
  if (!violations.empty()) return MakeInvalid("PauseRequest", std::move(violations));
  return parsed;
}

absl::StatusOr<engine::Engine::GpuShareLimit> ParseGpuShareLimit(
    const v1::LimitGpuShareRequest& request) {
  Violations violations;
  CheckId("limit_id", "GPU_SHARE_LIMIT_ID_INVALID", request.limit_id(), &violations);
  const double share = request.gpu_share();
  if (!request.has_gpu_share() || !(share >= kMinGpuShare && share <= 1)) {
    Add(&violations, "gpu_share", "GPU_SHARE_OUT_OF_RANGE",
        absl::StrCat(share, " is not in [", kMinGpuShare, ", 1]"));
  }
  const absl::Duration time = absl::Seconds(request.time_to_live().seconds()) +
                              absl::Nanoseconds(request.time_to_live().nanos());
  if (time <= absl::ZeroDuration() || time > kMaxGpuShareTime) {
    Add(&violations, "time_to_live", "TIME_TO_LIVE_OUT_OF_RANGE",
        absl::StrCat(absl::FormatDuration(time), " is not above 0 and at most ",
                     absl::FormatDuration(kMaxGpuShareTime)));
  }
  if (!violations.empty()) return MakeInvalid("LimitGpuShareRequest", std::move(violations));
  return engine::Engine::GpuShareLimit{request.limit_id(), share, time};
}

absl::Status CheckLimitId(const v1::EndGpuShareLimitRequest& request) {
  Violations violations;
  CheckId("limit_id", "GPU_SHARE_LIMIT_ID_INVALID", request.limit_id(), &violations);
  if (!violations.empty()) return MakeInvalid("EndGpuShareLimitRequest", std::move(violations));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ParseSleepTags(
    const google::protobuf::RepeatedPtrField<std::string>& tags) {
  for (const std::string& tag : tags) {
    if (tags.size() <= kMaxSleepTags && tag.size() <= kMaxSleepTagBytes) continue;
    return MakeInvalid("the request",
                       {{"tags", "SLEEP_TAG_INVALID", "a tag is one of weights, kv and adapters"}});
  }
  return std::vector<std::string>(tags.begin(), tags.end());
}

}  // namespace dorad::rpc
