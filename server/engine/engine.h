// The engine: continuous batching of generation and scoring over one model.
//
// One thread owns the scheduler, the KV pages and the model runner; everything else talks to it by
// messages. While the runner computes a step, the next one is scheduled and begun, and what the
// last one brought is delivered; a sequence that turns out to have ended then has one row more in
// flight, whose output is dropped, and its request's leases are held until that has finished. So it
// is with requests that are cancelled, aborted or too late: they end without a gap between the
// steps of others. Every accepted request ends in exactly one TokenStream::Close or
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

// Which requests an abort means.
struct AbortTarget {
  std::vector<std::string> request_ids;
  adapter::AdapterRef adapter;  // with a name: all requests that hold it (version 0: any version)
  bool all = false;
  std::optional<std::string> tenant;  // only requests of this one
};

enum class PauseMode { kAbort, kWait, kKeep };

class Engine {
 public:
  Engine(const EngineOptions& options, std::unique_ptr<ModelRunner> runner, Metrics* metrics);
  // Ends every request with UNAVAILABLE (SHUTTING_DOWN) and joins the thread.
  ~Engine();

  EngineLimits limits() const;
  // For the requests to come; from `options` only what EngineLimits has.
  void SetLimits(const EngineOptions& options);
  // As EngineOptions::gpu_share, from the next step on.
  void SetGpuShare(double share);

  // On success the engine ends the stream some day; on failure it never touches it. The handle is
  // for Cancel.
  // RESOURCE_EXHAUSTED (QUEUE_FULL) with a retry hint, ALREADY_EXISTS (REQUEST_ID_IN_USE),
  // UNAVAILABLE (ENGINE_PAUSED while Pause(WAIT) holds; SERVER_SLEEPING; SHUTTING_DOWN),
  // DEADLINE_EXCEEDED.
  absl::StatusOr<RequestHandle> Submit(GenerateInput input, std::shared_ptr<TokenStream> stream);
  absl::StatusOr<RequestHandle> Submit(ScoreInput input, std::shared_ptr<ScoreTicket> pause_id);

  // The request ends with CANCELLED (CLIENT_CANCELLED), unless it ends before.
  void Cancel(RequestHandle request);

  // To be called after a name's active version has moved: requests that follow it go over at the
  // next step.
  void NoteActivated();

  // Ends matching requests when the steps at hand have finished; `done` gets their number, on the
  // engine thread.
  void Abort(AbortTarget target, std::string detail, std::function<void(int)> done);
  struct PauseOptions {
    PauseMode mode = PauseMode::kKeep;
    adapter::AdapterRef scope;  // as of whose requests; the base's: of all
    // Whose share of the pauses of adapters it takes; nullopt: nobody's.
    std::optional<std::string> tenant = std::nullopt;
  };
  // Stops all requests or those that hold an adapter (version 0: any version); new ones are taken
  // and wait, with kWait they are refused. `done` runs on the engine thread when the pause is in
  // effect, with the number of requests that were ended (kAbort), have finished (kWait) or are
  // frozen (kKeep). kWait lets the requests of its scope run, whatever pauses of adapters there
  // are. ABORTED (PAUSE_SUPERSEDED) for a kWait that another pause of its scope or of a wider one,
  // or a resume of its scope or of everything overtakes, and for a kKeep of a part of what a kWait
  // waits for. RESOURCE_EXHAUSTED (PAUSES_FULL). Returns a pause_id for CancelPause.
  using PauseDone = std::function<void(absl::StatusOr<int>)>;
  uint64_t Pause(PauseOptions options, PauseDone done);
  // A kWait that is not in effect yet ends with CANCELLED, and what it changed is undone, unless
  // somebody else waits for the same.
  void CancelPause(uint64_t pause_id);
  // Undoes the pauses of the scope; of the base's reference all pauses.
  void Resume(const adapter::AdapterRef& scope, std::function<void()> done);

  struct SleepOptions {
    bool kv = false;       // gives the KV cache's memory back
    bool keep_kv = false;  // whose contents come back; else they are computed again
    bool refuse = false;   // new requests, with UNAVAILABLE (SERVER_SLEEPING); else they wait
  };
  // Starts no step until Wake, whatever resumes; no sequence holds an adapter's weights meanwhile.
  // `done` runs on the engine thread when the last step has finished, with the bytes that went
  // back. May be called again to give back more.
  void Sleep(SleepOptions options, std::function<void(absl::StatusOr<int64_t>)> done);
  // Takes the KV cache's memory, if it was given back and `kv` asks for it; go_on: steps start
  // again. OUT_OF_MEMORY: nothing has changed.
  void Wake(bool kv, bool go_on, std::function<void(absl::Status)> done);

  // From now on steps take at most `share` of the time, for `time` or until EndGpuShareLimit. Under
  // the id of a limit that is in effect it changes that one. Of several, and of
  // EngineOptions::gpu_share, the smallest share counts. `done` runs on the engine thread with the
  // share that is in effect then. RESOURCE_EXHAUSTED (TOO_MANY_GPU_SHARE_LIMITS).
  struct GpuShareLimit {
    std::string id;
    double share = 1;  // above 0, at most 1
    absl::Duration time;
  };
  void LimitGpuShare(GpuShareLimit options, std::function<void(absl::StatusOr<double>)> done);
  // `done` runs on the engine thread with whether it was in effect still.
  void EndGpuShareLimit(std::string id, std::function<void(bool)> done);

  // Gives memory of the KV cache that no request uses to whoever needs it more: so many bytes, or
  // as many as there are. `done` runs on the engine thread when the steps at hand have finished,
  // with the bytes that went back. They come again when requests are short of pages, and nobody
  // else of memory.
  void ShrinkKv(int64_t bytes, std::function<void(int64_t)> done);

  // As of the end of the last step.
  EngineStats stats() const;
  AdaptersInUse adapters_in_use() const;
  // How long ago the engine thread showed a sign of life (about once a second when idle).
  absl::Duration time_since_heartbeat() const;

  // From now on new requests are refused with UNAVAILABLE (SHUTTING_DOWN); running ones go on with
  // all of the time, whatever limits there are, and whatever EngineOptions::gpu_share says.
  void StopAdmission();
  // True when nothing is queued or running.
  bool idle() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dorad::engine
