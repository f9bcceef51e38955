// What a step costs around the forward pass: the engine over a device that is none, every step of
// which takes a given time (0: none at all), as a GPU's would that works beside the host.
//
//   engine_bench [STEP_MICROSECONDS [SEQUENCES...]]       default 0, 1 32 128 256
//
// One JSON line for each number of sequences: the mean time from step to step, in microseconds.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "server/base/metrics.h"
#include "server/engine/engine.h"
#include "server/engine/model_runner.h"

namespace dorad::engine {
namespace {

using Clock = std::chrono::steady_clock;

class TimedRunner final : public ModelRunner {
 public:
  explicit TimedRunner(std::chrono::microseconds step) : step_(step) {}

  int64_t kv_pages() const override { return 1 << 16; }
  int max_steps_in_flight() const override { return 2; }

  absl::Status Begin(absl::Span<const StepSequence> sequences) override {
    done_ = std::max(done_, Clock::now()) + step_;
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
      output.token = 1;
      output.logprobs.logprobs = {-1.0f};
    }
    return outputs;
  }
  absl::StatusOr<int64_t> ReleaseKv(absl::Span<const int32_t>) override { return 0; }
  absl::Status RestoreKv() override { return absl::OkStatus(); }

 private:
  const std::chrono::microseconds step_;
  Clock::time_point done_;
  std::deque<std::pair<Clock::time_point, size_t>> in_flight_;
};

void Report(int step_us, int sequences) {
  constexpr int kTokens = 1024;
  EngineOptions options;
  options.max_step_tokens = 2048;
  options.vocab_size = 1000;
  options.context_length = 4096;
  Metrics metrics(Metrics::Info{"bench", "none", "none", "cpu", "fp32"});
  Engine engine(options, std::make_unique<TimedRunner>(std::chrono::microseconds(step_us)),
                &metrics);
  adapter::AdapterSummary summary;
  summary.digest = std::string(64, 'd');
  const auto adapter = std::make_shared<const adapter::LoadedAdapter>("policy", 1, summary);
  std::vector<std::shared_ptr<TokenStream>> streams;
  engine.Pause({PauseMode::kKeep, {}}, [](auto) {});
  for (int i = 0; i < sequences; ++i) {
    GenerateInput input;
    input.request_id = "request-" + std::to_string(i);
    input.prompt.assign(128, i);
    input.lease = adapter::AdapterLease(adapter, [] {});
    input.stop.max_tokens = kTokens;
    input.stop.ignore_eos = true;
    input.logprobs.mode = LogprobMode::kRaw;
    streams.push_back(std::make_shared<TokenStream>(/*final_only=*/false));
    if (!engine.Submit(std::move(input), streams.back()).ok()) std::exit(1);
  }
  const Clock::time_point begin = Clock::now();
  engine.Resume({}, [] {});
  while (!engine.idle()) absl::SleepFor(absl::Milliseconds(1));
  const std::chrono::duration<double, std::micro> took = Clock::now() - begin;
  std::printf("{\"sequences\": %d, \"step_us\": %d, \"from_step_to_step_us\": %.1f}\n", sequences,
              step_us, took.count() / static_cast<double>(engine.stats().steps));
  std::fflush(stdout);
}

}  // namespace
}  // namespace dorad::engine

int main(int argc, char** argv) {
  const int step_us = argc > 1 ? std::atoi(argv[1]) : 0;
  std::vector<int> sequences;
  for (int i = 2; i < argc; ++i) sequences.push_back(std::atoi(argv[i]));
  if (sequences.empty()) sequences = {1, 32, 128, 256};
  for (const int n : sequences) dorad::engine::Report(step_us, n);
  return 0;
}
