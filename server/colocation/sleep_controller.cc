#include "server/colocation/sleep_controller.h"

#include <utility>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/platform/error.h"
#include "server/platform/exception.h"
#include "server/platform/instant.h"
#include "server/platform/log.h"

namespace dorad {
namespace {

constexpr char kWeights[] = "weights";
constexpr char kKv[] = "kv";
constexpr char kAdapters[] = "adapters";

// Waits for a function that calls back once.
template <typename Result, typename Start>
Result Await(Start start) {
  Result result;
  absl::Notification done;
  start([&](Result r) {
    result = std::move(r);
    done.Notify();
  });
  done.WaitForNotification();
  return result;
}

// Answers the caller even when the work throws.
template <typename Result, typename Work>
Result Guarded(const char* what, Work work) {
  try {
    return work();
  } catch (...) {
    return StatusOfException(what, "INTERNAL_ERROR");
  }
}

}  // namespace

void SleepController::Sleep(Tags tags, Options options, SleepDone done) {
  executor_([this, tags = std::move(tags), options, done = std::move(done)] {
    done(Guarded<absl::StatusOr<Bytes>>("Sleep", [&]() -> absl::StatusOr<Bytes> {
      DORAD_ASSIGN_OR_RETURN(const TagSet parsed, ParseTags(tags));
      return SleepNow(parsed, options);
    }));
  });
}

void SleepController::Wake(Tags tags, std::function<void(absl::Status)> done) {
  executor_([this, tags = std::move(tags), done = std::move(done)] {
    done(Guarded<absl::Status>("Wake", [&]() -> absl::Status {
      DORAD_ASSIGN_OR_RETURN(const TagSet parsed, ParseTags(tags));
      return WakeNow(parsed);
    }));
  });
}

SleepControl::Tags SleepController::asleep() const {
  absl::MutexLock lock(&mu_);
  return {asleep_.begin(), asleep_.end()};
}

absl::StatusOr<SleepController::TagSet> SleepController::ParseTags(const Tags& tags) {
  const TagSet all(kAllTags.begin(), kAllTags.end());
  if (tags.empty()) return all;
  for (const std::string& tag : tags) {
    if (all.count(tag) == 0) {
      return MakeInvalid("the request", {{"tags", "SLEEP_TAG_INVALID",
                                          "a tag is one of weights, kv and adapters"}});
    }
  }
  return TagSet(tags.begin(), tags.end());
}

absl::StatusOr<SleepController::Bytes> SleepController::SleepNow(const TagSet& tags,
                                                                 const Options& options) {
  absl::MutexLock turn(&turn_);
  const Instant start = SteadyNow();
  const auto begins = [&](const char* tag) { return tags.count(tag) > 0 && !IsAsleep(tag); };
  Bytes freed;
  const bool kv = begins(kKv);
  DORAD_ASSIGN_OR_RETURN(const int64_t kv_bytes, StopEngine(kv, options));
  if (kv) {
    freed[kKv] = kv_bytes;
    SetAsleep(kKv, true);
  }
  if (begins(kAdapters)) {
    SetAsleep(kAdapters, true);
    freed[kAdapters] = residency_.Sleep();
    backend_.ReturnFreedMemory();
  }
  if (begins(kWeights)) {
    SetAsleep(kWeights, true);
    loader_.Suspend();
    freed[kWeights] = backend_.SleepWeights();
  }
  for (const auto& [tag, bytes] : freed) {
    LogInfo("sleeping", {{"tag", tag}, {"freed_bytes", bytes}});
  }
  LogInfo("fell asleep", {{"seconds", absl::ToDoubleSeconds(Since(start))}});
  return freed;
}

absl::StatusOr<int64_t> SleepController::StopEngine(bool kv, const Options& options) {
  engine::Engine::SleepOptions of_engine;
  of_engine.kv = kv;
  of_engine.keep_kv = options.keep_kv;
  of_engine.refuse = options.refuse_requests;
  const auto released =
      Await<absl::StatusOr<int64_t>>([&](auto done) { engine_.Sleep(of_engine, std::move(done)); });
  // With no tag asleep, no Wake would restart the engine.
  if (!released.ok() && asleep().empty()) (void)WakeEngine(/*kv=*/false, /*go_on=*/true);
  return released;
}

absl::Status SleepController::WakeNow(const TagSet& tags) {
  absl::MutexLock turn(&turn_);
  const Instant start = SteadyNow();
  const auto wakes = [&](const char* tag) { return tags.count(tag) > 0 && IsAsleep(tag); };
  if (asleep().empty()) return absl::OkStatus();
  if (wakes(kWeights)) {
    DORAD_RETURN_IF_ERROR(WithRoom([&] { return backend_.WakeWeights(); }));
    SetAsleep(kWeights, false);
    loader_.Resume();
  }
  if (wakes(kKv)) {
    DORAD_RETURN_IF_ERROR(WithRoom([&] { return WakeEngine(/*kv=*/true, /*go_on=*/false); }));
    SetAsleep(kKv, false);
  }
  if (wakes(kAdapters)) {
    DORAD_RETURN_IF_ERROR(residency_.Wake());
    SetAsleep(kAdapters, false);
  }
  if (!asleep().empty()) return absl::OkStatus();
  DORAD_RETURN_IF_ERROR(WakeEngine(/*kv=*/false, /*go_on=*/true));
  LogInfo("woke up", {{"seconds", absl::ToDoubleSeconds(Since(start))}});
  return absl::OkStatus();
}

absl::Status SleepController::WakeEngine(bool kv, bool go_on) {
  return Await<absl::Status>([&](auto done) { engine_.Wake(kv, go_on, std::move(done)); });
}

absl::Status SleepController::WithRoom(absl::FunctionRef<absl::Status()> attempt) {
  return residency_.WithRoom([&] {
    backend_.ReturnFreedMemory();
    return attempt();
  });
}

bool SleepController::IsAsleep(const std::string& tag) const {
  absl::MutexLock lock(&mu_);
  return asleep_.count(tag) > 0;
}

void SleepController::SetAsleep(const std::string& tag, bool asleep) {
  absl::MutexLock lock(&mu_);
  if (asleep) {
    asleep_.insert(tag);
  } else {
    asleep_.erase(tag);
  }
}

}  // namespace dorad
