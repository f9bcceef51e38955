#include "server/app/sleeper.h"

#include <algorithm>

#include "absl/functional/function_ref.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/base/error.h"
#include "server/base/instant.h"
#include "server/base/log.h"

namespace dorad {
namespace {

constexpr char kWeights[] = "weights";
constexpr char kKv[] = "kv";
constexpr char kAdapters[] = "adapters";

// Waits for a function that calls back once.
template <typename Result, typename Start>
Result Await(Result initial, Start start) {
  Result result = std::move(initial);
  absl::Notification done;
  start([&](Result r) {
    result = std::move(r);
    done.Notify();
  });
  done.WaitForNotification();
  return result;
}

}  // namespace

const Sleeper::Tags& Sleeper::AllTags() {
  static const auto* const tags = new Tags{kWeights, kKv, kAdapters};
  return *tags;
}

absl::StatusOr<Sleeper::Tags> Sleeper::ParseTags(const std::vector<std::string>& tags) {
  if (tags.empty()) return AllTags();
  for (const std::string& tag : tags) {
    if (AllTags().count(tag) == 0) {
      return MakeInvalid("the request", {{"tags", "SLEEP_TAG_INVALID",
                                          "a tag is one of weights, kv and adapters"}});
    }
  }
  return Tags(tags.begin(), tags.end());
}

absl::StatusOr<Sleeper::Bytes> Sleeper::Sleep(const Tags& tags, const Options& options) {
  absl::MutexLock turn(&turn_);
  const Instant start = SteadyNow();
  const Tags before = asleep();
  const auto begins = [&](const char* tag) {
    return tags.count(tag) > 0 && before.count(tag) == 0;
  };
  Bytes freed;
  engine::Engine::SleepOptions of_engine;
  of_engine.kv = begins(kKv);
  of_engine.keep_kv = options.keep_kv;
  of_engine.refuse = options.refuse_requests;
  const auto released = Await<absl::StatusOr<int64_t>>(
      0, [&](auto done) { engine_.Sleep(of_engine, std::move(done)); });
  if (!released.ok()) {
    // With nothing asleep nobody would wake the engine.
    if (before.empty()) {
      (void)Await<absl::Status>(absl::OkStatus(), [&](auto done) {
        engine_.Wake(/*kv=*/false, /*go_on=*/true, std::move(done));
      });
    }
    return released.status();
  }
  if (begins(kKv)) {
    freed[kKv] = *released;
    SetAsleep(kKv, true);
  }
  if (begins(kAdapters)) {
    SetAsleep(kAdapters, true);
    freed[kAdapters] = residency_.Sleep();
    backend_.ReturnFreedMemory();
  }
  if (begins(kWeights)) {
    SetAsleep(kWeights, true);
    loader_.HoldLoads();
    residency_.HoldRecalls();
    freed[kWeights] = backend_.SleepWeights();
  }
  for (const auto& [tag, bytes] : freed) {
    LogInfo("sleeping", {{"tag", tag}, {"freed_bytes", bytes}});
  }
  LogInfo("went to sleep", {{"seconds", absl::ToDoubleSeconds(Since(start))}});
  return freed;
}

absl::Status Sleeper::Wake(const Tags& tags) {
  absl::MutexLock turn(&turn_);
  const Instant start = SteadyNow();
  const auto wakes = [&](const char* tag) {
    return tags.count(tag) > 0 && asleep().count(tag) > 0;
  };
  if (asleep().empty()) return absl::OkStatus();
  // What was published meanwhile may make room.
  const auto with_room = [&](absl::FunctionRef<absl::Status()> attempt) {
    return residency_.WithRoom([&] {
      backend_.ReturnFreedMemory();
      return attempt();
    });
  };
  if (wakes(kWeights)) {
    DORAD_RETURN_IF_ERROR(with_room([&] { return backend_.WakeWeights(); }));
    SetAsleep(kWeights, false);
    residency_.ReleaseRecalls();
    loader_.ReleaseLoads();
  }
  if (wakes(kKv)) {
    DORAD_RETURN_IF_ERROR(with_room([&] {
      return Await<absl::Status>(absl::OkStatus(), [&](auto done) {
        engine_.Wake(/*kv=*/true, /*go_on=*/false, std::move(done));
      });
    }));
    SetAsleep(kKv, false);
  }
  if (wakes(kAdapters)) {
    DORAD_RETURN_IF_ERROR(residency_.Wake());
    SetAsleep(kAdapters, false);
  }
  if (asleep().empty()) {
    DORAD_RETURN_IF_ERROR(Await<absl::Status>(absl::OkStatus(), [&](auto done) {
      engine_.Wake(/*kv=*/false, /*go_on=*/true, std::move(done));
    }));
    LogInfo("woke up", {{"seconds", absl::ToDoubleSeconds(Since(start))}});
  }
  return absl::OkStatus();
}

Sleeper::Tags Sleeper::asleep() const {
  absl::MutexLock lock(&mu_);
  return asleep_;
}

void Sleeper::SetAsleep(const std::string& tag, bool asleep) {
  absl::MutexLock lock(&mu_);
  if (asleep) {
    asleep_.insert(tag);
  } else {
    asleep_.erase(tag);
  }
}

}  // namespace dorad
