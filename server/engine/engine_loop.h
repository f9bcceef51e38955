// The engine thread's loop: handles messages, ends requests and computes steps. Ends of requests
// are in engine_loop_ends.cc, pauses in engine_loop_pauses.cc. Confined to the engine thread,
// except for construction; owned by Engine.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/engine/admission.h"
#include "server/engine/draft_trial.h"
#include "server/engine/duty_cycle_limiter.h"
#include "server/engine/engine.h"
#include "server/engine/gpu_share_limits.h"
#include "server/engine/image_gate.h"
#include "server/engine/kv_balloon.h"
#include "server/engine/kv_pages.h"
#include "server/engine/model_runner.h"
#include "server/engine/options.h"
#include "server/engine/pauses.h"
#include "server/engine/request.h"
#include "server/engine/scheduler.h"
#include "server/engine/stats_board.h"
#include "server/engine/step_cost.h"
#include "server/engine/step_pipeline.h"
#include "server/engine/weights_gate.h"

namespace dorad::engine {

class EngineLoop {
 public:
  // admission, board and metrics are borrowed.
  EngineLoop(const EngineOptions& options, StopRules rules, std::unique_ptr<ModelRunner> runner,
             Admission* admission, StatsBoard* board, Metrics* metrics);

  // Runs until Admission::Close and ends every request with UNAVAILABLE (SHUTTING_DOWN).
  void Run();

  // --- Messages. As Engine's functions of the same names.
  void Enter(Request* request);
  void Cancel(const RequestHandle& handle);
  void NoteActivated() { activations_noted_ = true; }
  void Abort(const AbortTarget& target, const std::string& detail,
             const std::function<void(int)>& done);
  void Pause(const Engine::PauseOptions& options, uint64_t pause_id, Engine::PauseDone done);
  void CancelPause(uint64_t pause_id);
  void Resume(const adapter::AdapterRef& scope, const std::function<void()>& done);
  void Sleep(const Engine::SleepOptions& options,
             const std::function<void(absl::StatusOr<int64_t>)>& done);
  absl::Status Wake(bool kv, bool go_on);
  void LimitGpuShare(const Engine::GpuShareLimit& options,
                     const std::function<void(absl::StatusOr<double>)>& done);
  void EndGpuShareLimit(const std::string& id, const std::function<void(bool)>& done);
  void SetGpuShare(double share);
  void ShrinkKv(int64_t bytes, const std::function<void(int64_t)>& done);
  // For the drain: shares no longer apply.
  void TakeAllTime();

 private:
  std::vector<Admission::Message> TakeMessages(bool* stop);
  bool may_step() const { return !pauses_.all() && !asleep_since_; }
  void FollowActiveVersions();
  void Follow(Request* request, adapter::AdapterLease lease);

  void ApplyGpuShare(Instant now);

  // --- Steps.
  void Step();
  void BeginSteps();
  bool HasRoom() const;
  bool BeginStep();
  void EncodeImages();
  void FinishStep();
  struct StepRowCounts {
    int64_t count = 0;
    bool has_prompt = false;
    DraftTrial::BySource<bool> has_drafts = {};
  };
  static StepRowCounts CountRows(const std::vector<Chunk>& chunks);
  void ObserveTrial(const StepRowCounts& rows, absl::Duration step_time, Instant now);
  std::vector<DraftTrial::Progress> Progress() const;
  // Finishes all steps in flight. Leaves the runner idle: only for work that cannot overlap a step.
  void FinishAll();
  // Runs `then` after the steps now in flight; they do not wait for it.
  void AfterStepsInFlight(std::function<void()> then);
  void ReportGenerated(const StepPipeline::Finished& step) const;
  void NoteStarted(Request* request, Instant now);
  void DeliverAll(StepPipeline::Finished* step);
  void Deliver(const Chunk& chunk, StepOutput output, const Request::StepEnd& step);
  void Land(const Chunk& chunk);
  void Fail(const std::vector<Chunk>& chunks, const absl::Status& status);

  // --- Ends.
  void EndOverdue();
  // Why the request does not run; nullopt: it does, or waits for its turn.
  struct Hindrance {
    Instant since;
    std::string waited_for, text;  // for ErrorInfo and the message
  };
  std::optional<Hindrance> HindranceOf(const Request& request, Instant now) const;
  void EndWithoutWeights();
  void BeginEnd(Request* request, Request::Ending how);
  void CompleteEnd(Request* request);
  int AbortMatching(const AbortTarget& target, const std::string& detail);

  // --- Pauses.
  void Supersede(const std::vector<Pauses::Waiter>& waiters);
  void FollowPauses();
  void FreezeOrThaw(Request* request);
  bool AllHaveEnded(const adapter::AdapterRef& scope, std::string* witness) const;
  void CompletePauses();
  int CountCovered(const adapter::AdapterRef& scope) const;
  void PublishStats();
  // Publishes first: the caller must see its effect in stats().
  template <typename Done, typename... Args>
  void Answer(const Done& done, Args... args) {
    PublishStats();
    done(args...);
  }

  const StopRules rules_;
  const std::function<void(const std::string&, int64_t)> on_generated_;  // EngineOptions'
  double gpu_share_;
  Admission* const admission_;
  StatsBoard* const board_;
  Metrics* const metrics_;
  KvPages pages_;
  KvBalloon balloon_;
  WeightsGate weights_;
  ImageGate images_;
  Scheduler scheduler_;
  StepPipeline pipeline_;
  StepCost cost_;
  DraftTrial trial_;
  Instant last_step_end_;
  DutyCycleLimiter limiter_;
  GpuShareLimits gpu_share_limits_;
  Pauses pauses_;
  std::set<std::pair<Instant, Request*>> deadlines_;  // by Request::wake_up
  // Ended in this turn; kept because the current step may still refer to them.
  std::vector<std::unique_ptr<Request>> finished_requests_;
  // Runs `then` after the step of this number and all earlier ones.
  struct AfterStep {
    uint64_t step = 0;
    std::function<void()> then;
  };
  std::deque<AfterStep> after_steps_;  // in order of steps
  bool takes_all_time_ = false;
  std::optional<Instant> asleep_since_;
  bool kv_released_ = false;
  bool stalled_ = false;  // all runnable sequences wait for evicted weights
  int64_t frozen_requests_ = 0;
  bool activations_noted_ = false;  // since the last FollowActiveVersions
  uint64_t next_arrival_ = 0;
};

}  // namespace dorad::engine
