// The engine: continuous batching of generation and scoring over one model.
//
// One thread owns the scheduler, the KV pages and the model runner; other threads send it messages.
// While the runner computes a step, the engine schedules and begins the next one and delivers the
// results of the last one. The end of a sequence may therefore be known only after its next row has
// begun: that row's output is dropped, and the request keeps its leases until the row has finished.
// The same holds for cancelled, aborted and overdue requests, so that no end delays the steps of
// other requests. Every accepted request ends in exactly one TokenStream::Close or
// ScoreTicket::Finish. Owned by App. All public functions are thread-safe and never wait for a
// step, except the destructor.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/options.h"
#include "server/engine/token_stream.h"
#include "server/engine/types.h"

namespace dorad {
class Metrics;
}

namespace dorad::engine {

class ModelRunner;

// The requests that an abort ends.
struct AbortTarget {
  std::vector<std::string> request_ids;
  adapter::AdapterRef adapter;  // with a name: all requests that hold it (version 0: any version)
  bool all = false;
  std::optional<std::string> tenant;  // only this tenant's requests
};

enum class PauseMode { kAbort, kWait, kKeep };

class Engine {
 public:
  Engine(const EngineOptions& options, std::unique_ptr<ModelRunner> runner, Metrics* metrics);
  // Ends every request with UNAVAILABLE (SHUTTING_DOWN) and joins the thread.
  ~Engine();

  EngineLimits limits() const;
  // Applies the fields of EngineLimits to new requests.
  void SetLimits(const EngineOptions& options);
  // Sets EngineOptions::gpu_share from the next step on.
  void SetGpuShare(double share);

  // On success the engine closes the stream eventually; on failure it never touches it. The handle
  // is for Cancel. RESOURCE_EXHAUSTED (QUEUE_FULL) with a retry hint, ALREADY_EXISTS
  // (REQUEST_ID_IN_USE), UNAVAILABLE (ENGINE_PAUSED during Pause(WAIT); SERVER_SLEEPING;
  // SHUTTING_DOWN), DEADLINE_EXCEEDED.
  absl::StatusOr<RequestHandle> Submit(GenerateInput input, std::shared_ptr<TokenStream> stream);
  absl::StatusOr<RequestHandle> Submit(ScoreInput input, std::shared_ptr<ScoreTicket> ticket);

  // The request ends with CANCELLED (CLIENT_CANCELLED), unless it has ended.
  void Cancel(RequestHandle request);

  // Call after a name's active version has moved: requests that follow it switch at the next step.
  void NoteActivated();

  // Ends matching requests. After the steps in flight, `done` gets their number on the engine
  // thread.
  void Abort(AbortTarget target, std::string detail, std::function<void(int)> done);
  struct PauseOptions {
    PauseMode mode = PauseMode::kKeep;
    adapter::AdapterRef scope;  // an adapter's requests; the base's: all requests
    // The tenant whose quota of adapter pauses it uses; nullopt: none.
    std::optional<std::string> tenant = std::nullopt;
  };
  // Stops all requests or those of an adapter (version 0: any version). New ones are accepted and
  // wait; with kWait they are refused. `done` runs on the engine thread when the pause is in
  // effect, with the number of requests that were ended (kAbort), have finished (kWait) or are
  // frozen (kKeep). kWait lets the requests of its scope run in spite of pauses of adapters.
  // ABORTED (PAUSE_SUPERSEDED) for a kWait when another pause of the same or a wider scope begins,
  // or when the scope or everything resumes; also for a kKeep within the scope of a kWait.
  // RESOURCE_EXHAUSTED (PAUSES_FULL). Returns a pause_id for CancelPause.
  using PauseDone = std::function<void(absl::StatusOr<int>)>;
  uint64_t Pause(PauseOptions options, PauseDone done);
  // Ends a pending kWait with CANCELLED and undoes its effects, unless another call waits for the
  // same scope.
  void CancelPause(uint64_t pause_id);
  // Undoes the pauses of the scope; for the base, all pauses.
  void Resume(const adapter::AdapterRef& scope, std::function<void()> done);

  struct SleepOptions {
    bool kv = false;       // releases the KV cache's memory
    bool keep_kv = false;  // restores its contents; else they are recomputed
    bool refuse = false;   // refuses new requests with SERVER_SLEEPING; else they wait
  };
  // Starts no step until Wake, even after a resume; no sequence pins adapter weights meanwhile.
  // `done` runs on the engine thread after the last step, with the released bytes. A second call
  // may release more.
  void Sleep(SleepOptions options, std::function<void(absl::StatusOr<int64_t>)> done);
  // Allocates the KV cache's memory, if it was released and `kv` is set; go_on: steps start again.
  // OUT_OF_MEMORY: nothing has changed.
  void Wake(bool kv, bool go_on, std::function<void(absl::Status)> done);

  // Limits steps to `share` of the time, for `time` or until EndGpuShareLimit. The id of a current
  // limit replaces that limit. The smallest of all limits and EngineOptions::gpu_share applies.
  // `done` runs on the engine thread with the share in effect. RESOURCE_EXHAUSTED
  // (TOO_MANY_GPU_SHARE_LIMITS).
  struct GpuShareLimit {
    std::string id;
    double share = 1;  // above 0, at most 1
    absl::Duration time;
  };
  void LimitGpuShare(GpuShareLimit options, std::function<void(absl::StatusOr<double>)> done);
  // `done` runs on the engine thread; true: the limit was in effect.
  void EndGpuShareLimit(std::string id, std::function<void(bool)> done);

  // Releases unused memory of the KV cache: `bytes`, or less if less is unused. After the steps in
  // flight, `done` gets the released bytes on the engine thread. The cache grows again when
  // requests lack pages and memory is free.
  void ShrinkKv(int64_t bytes, std::function<void(int64_t)> done);

  // As of the end of the last step.
  EngineStats stats() const;
  AdaptersInUse adapters_in_use() const;
  // Time since the engine thread's last heartbeat (about one a second when idle).
  absl::Duration time_since_heartbeat() const;

  // Refuses new requests with UNAVAILABLE (SHUTTING_DOWN). Running requests continue at full speed:
  // EngineOptions::gpu_share and all limits no longer apply.
  void StopAdmission();
  // True when nothing is queued or running.
  bool idle() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dorad::engine
