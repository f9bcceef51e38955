// What a step costs around the forward pass: the engine over a device that is none, every step of
// which takes a given time (0: none at all), as a GPU's would that works beside the host.
//
//   engine_bench [STEP_MICROSECONDS [SEQUENCES...]]       default 0, 1 32 128 256
//
// One JSON line for each number of sequences: the mean time from step to step, in microseconds; and
// when steps take time, the share of it in which the device has a step while clients cancel a
// request and begin another one every millisecond.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "server/engine/engine.h"
#include "server/engine/model_runner.h"
#include "server/platform/metrics/metrics.h"

namespace dorad::engine {
namespace {

using Clock = std::chrono::steady_clock;

class TimedRunner final : public ModelRunner {
 public:
  explicit TimedRunner(std::chrono::microseconds step) : step_(step) {}

  int64_t kv_pages() const override { return 1 << 16; }
  int max_steps_in_flight() const override { return 2; }

  absl::Status Begin(absl::Span<const StepSequence> sequences) override {
    const Clock::time_point now = Clock::now();
    if (done_ != Clock::time_point() && now > done_) idle_ += now - done_;
    done_ = std::max(done_, now) + step_;
    in_flight_.push_back({done_, sequences.size()});
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<StepOutput>> Finish() override {
    const auto [done, sequences] = in_flight_.front();
    in_flight_.pop_front();
    while (Clock::now() < done) {
    }
    std::vector<StepOutput> outputs(sequences);
    for (StepOutput& output : outputs) {
      output.tokens = {1};
      output.logprobs.logprobs = {-1.0f};
    }
    return outputs;
  }
  absl::StatusOr<int64_t> ReleaseKv(absl::Span<const int32_t>) override { return 0; }
  absl::Status RestoreKv() override { return absl::OkStatus(); }

  // Between the end of a step and the begin of the next one, in all. When the engine is idle.
  Clock::duration idle() const { return idle_; }

 private:
  const std::chrono::microseconds step_;
  Clock::time_point done_;
  Clock::duration idle_{0};
  std::deque<std::pair<Clock::time_point, size_t>> in_flight_;
};

EngineOptions Options() {
  EngineOptions options;
  options.max_step_tokens = 2048;
  options.vocab_size = 1000;
  options.context_length = 4096;
  return options;
}

class Client {
 public:
  explicit Client(Engine* engine) : engine_(*engine) {
    adapter::AdapterSummary summary;
    summary.digest = std::string(64, 'd');
    adapter_ = std::make_shared<const adapter::LoadedAdapter>("policy", 1, summary);
  }

  RequestHandle Submit(int64_t tokens) {
    GenerateInput input;
    input.request_id = "request-" + std::to_string(submitted_);
    input.prompt.assign(128, submitted_++ % 1000);
    input.lease = adapter::AdapterLease(adapter_, [] {});
    input.stop.max_tokens = tokens;
    input.stop.ignore_eos = true;
    input.logprobs.mode = LogprobMode::kRaw;
    auto stream = std::make_shared<TokenStream>(/*final_only=*/false);
    absl::StatusOr<RequestHandle> handle = engine_.Submit(std::move(input), std::move(stream));
    if (!handle.ok()) std::exit(1);
    return *std::move(handle);
  }

  void AwaitIdle() const {
    while (!engine_.idle()) absl::SleepFor(absl::Milliseconds(1));
  }

 private:
  Engine& engine_;
  std::shared_ptr<const adapter::LoadedAdapter> adapter_;
  int submitted_ = 0;
};

void Report(int step_us, int sequences) {
  constexpr int kTokens = 1024;
  Metrics metrics(Metrics::Info{"bench", "none", "none", "cpu", "fp32"});
  Engine engine(Options(), std::make_unique<TimedRunner>(std::chrono::microseconds(step_us)),
                &metrics);
  Client client(&engine);
  engine.Pause({PauseMode::kKeep, {}}, [](auto) {});
  for (int i = 0; i < sequences; ++i) client.Submit(kTokens);
  const Clock::time_point begin = Clock::now();
  engine.Resume({}, [] {});
  client.AwaitIdle();
  const std::chrono::duration<double, std::micro> took = Clock::now() - begin;
  std::printf("{\"sequences\": %d, \"step_us\": %d, \"from_step_to_step_us\": %.1f}\n", sequences,
              step_us, took.count() / static_cast<double>(engine.stats().steps));
  std::fflush(stdout);
}

void ReportCancels(int step_us, int sequences) {
  constexpr int kCancels = 2000;
  Metrics metrics(Metrics::Info{"bench", "none", "none", "cpu", "fp32"});
  auto owned = std::make_unique<TimedRunner>(std::chrono::microseconds(step_us));
  const TimedRunner* const runner = owned.get();
  Engine engine(Options(), std::move(owned), &metrics);
  Client client(&engine);
  std::deque<RequestHandle> running;
  for (int i = 0; i < sequences; ++i) running.push_back(client.Submit(3000));
  const Clock::time_point begin = Clock::now();
  for (int i = 0; i < kCancels; ++i) {
    absl::SleepFor(absl::Milliseconds(1));
    engine.Cancel(running.front());
    running.pop_front();
    running.push_back(client.Submit(3000));
  }
  const std::chrono::duration<double> took = Clock::now() - begin;
  for (const RequestHandle& request : running) engine.Cancel(request);
  client.AwaitIdle();
  const std::chrono::duration<double> idle = runner->idle();
  std::printf(
      "{\"sequences\": %d, \"step_us\": %d, \"cancels_per_second\": %.0f, "
      "\"busy_share\": %.4f}\n",
      sequences, step_us, kCancels / took.count(), 1 - idle.count() / took.count());
  std::fflush(stdout);
}

}  // namespace
}  // namespace dorad::engine

int main(int argc, char** argv) {
  const int step_us = argc > 1 ? std::atoi(argv[1]) : 0;
  std::vector<int> sequences;
  for (int i = 2; i < argc; ++i) sequences.push_back(std::atoi(argv[i]));
  if (sequences.empty()) sequences = {1, 32, 128, 256};
  for (const int n : sequences) {
    dorad::engine::Report(step_us, n);
    if (step_us > 0) dorad::engine::ReportCancels(step_us, n);
  }
  return 0;
}
