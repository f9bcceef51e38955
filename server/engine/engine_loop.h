// The engine thread's turns: takes messages, ends what is to end, and computes steps. Confined to
// the engine thread, but for construction; owned by Engine.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/engine/admission.h"
#include "server/engine/engine.h"
#include "server/engine/kv_lending.h"
#include "server/engine/kv_pages.h"
#include "server/engine/model_runner.h"
#include "server/engine/options.h"
#include "server/engine/pauses.h"
#include "server/engine/request.h"
#include "server/engine/scheduler.h"
#include "server/engine/stats_board.h"
#include "server/engine/step_pacer.h"
#include "server/engine/step_pipeline.h"
#include "server/engine/weights_gate.h"
#include "server/engine/yields.h"

namespace dorad::engine {

class EngineLoop {
 public:
  // admission, board and metrics are borrowed.
  EngineLoop(const EngineOptions& options, StopRules rules, std::unique_ptr<ModelRunner> runner,
             Admission* admission, StatsBoard* board, Metrics* metrics);

  // Until Admission::Close; then every request has ended with UNAVAILABLE (SHUTTING_DOWN).
  void Run();

  // --- Messages. As Engine's functions of the same names.
  void Enter(std::unique_ptr<Request> request);
  void NoteCancelled() { cancels_noted_ = true; }
  void NoteActivated() { activations_noted_ = true; }
  void Abort(const AbortTarget& target, const std::string& detail,
             const std::function<void(int)>& done);
  void Pause(const Engine::PauseOptions& options, uint64_t ticket, Engine::PauseDone done);
  void WithdrawPause(uint64_t ticket);
  void Resume(const adapter::AdapterRef& scope, const std::function<void()>& done);
  void Sleep(const Engine::SleepOptions& options,
             const std::function<void(absl::StatusOr<int64_t>)>& done);
  absl::Status Wake(bool kv, bool go_on);
  void Yield(const Engine::YieldOptions& options,
             const std::function<void(absl::StatusOr<double>)>& done);
  void EndYield(const std::string& id, const std::function<void(bool)>& done);
  void SetGpuShare(double share);
  void LendKv(int64_t bytes, const std::function<void(int64_t)>& done);
  // What runs is to end soon: shares do not count any more.
  void TakeAllTime();

 private:
  std::vector<Admission::Message> TakeMessages(bool* stop);
  bool may_step() const { return !pauses_.all() && !asleep_; }
  void EndDeadRequests();
  void FollowActiveVersions();
  void Follow(Request* request, adapter::AdapterLease lease);
  bool IsHere(const Request* request) const;

  void FollowYields(Instant now);

  // --- Steps.
  void Step();
  bool HasRoom() const;
  bool BeginStep();
  void FinishStep();
  void FinishAll();
  void EndWithoutWeights();
  void NoteStarted(Request* request, Instant now);
  void Deliver(const Chunk& chunk, StepOutput output, Instant now);
  void Land(const Chunk& chunk);
  void Fail(const std::vector<Chunk>& chunks, const absl::Status& status);

  // --- Ends.
  template <typename Ending>
  void EndWith(Request* request, Ending ending);
  void EndRequest(Request* request, const absl::Status& status);
  void AbortRequest(Request* request, const std::string& detail);
  int AbortMatching(const AbortTarget& target, const std::string& detail);

  // --- Pauses.
  void Supersede(const std::vector<Pauses::Waiter>& waiters);
  void FollowPauses();
  void FreezeOrThaw(Request* request);
  bool AllHaveEnded(const adapter::AdapterRef& scope, std::string* witness) const;
  void CompletePauses();
  int CountCovered(const adapter::AdapterRef& scope) const;
  void PublishStats();
  template <typename Done, typename... Args>
  void Answer(const Done& done, Args... args);

  const StopRules rules_;
  double gpu_share_;
  Admission* const admission_;
  StatsBoard* const board_;
  Metrics* const metrics_;
  KvPages pages_;
  KvLending lending_;
  WeightsGate weights_;
  Scheduler scheduler_;
  StepPipeline pipeline_;
  StepPacer pacer_;
  Yields yields_;
  Pauses pauses_;
  std::unordered_map<std::string, std::unique_ptr<Request>> requests_;
  std::set<std::pair<Instant, Request*>> deadlines_;
  // Have ended in this turn.
  std::vector<std::unique_ptr<Request>> graveyard_;
  bool takes_all_time_ = false;
  bool asleep_ = false;
  bool kv_released_ = false;
  bool stalled_ = false;  // nobody can run before weights come
  int64_t frozen_requests_ = 0;
  bool cancels_noted_ = false;      // since cancelled requests were last looked for
  bool activations_noted_ = false;  // likewise, active versions
  uint64_t next_arrival_ = 0;
};

}  // namespace dorad::engine
