// The engine over a model runner, for benches: requests without a server around them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "server/adapter/registry/version.h"
#include "server/engine/engine.h"
#include "server/engine/model_runner.h"
#include "server/engine/options.h"
#include "server/engine/token_stream.h"
#include "server/platform/metrics/metrics.h"
#include "tests/bench/cuda_model.h"

namespace dorad::bench {

// Rows of a step, as the server chooses on a GPU.
inline constexpr int64_t kStepTokens = 2048;

class BenchEngine {
 public:
  // Without a prefix cache: every request computes its prompt.
  BenchEngine(const model::ModelConfig& model, int32_t sequences,
              std::unique_ptr<engine::ModelRunner> runner, int64_t step_tokens = kStepTokens)
      : engine_(OptionsOf(model, sequences, step_tokens), std::move(runner), &metrics_) {}

  // Greedy, with so many tokens after the prompt. adapter: nullptr: base.
  void Submit(std::vector<engine::TokenId> prompt, std::vector<engine::PlacedImage> images,
              std::shared_ptr<const adapter::LoadedAdapter> adapter, int64_t tokens) {
    engine::GenerateInput input;
    input.request_id = std::to_string(++submitted_);
    input.prompt = std::move(prompt);
    input.images = std::move(images);
    if (adapter != nullptr) input.lease = adapter::AdapterLease(std::move(adapter), [] {});
    input.sampling.temperature = 0.0f;
    input.stop.max_tokens = tokens;
    input.stop.ignore_eos = true;
    auto stream = std::make_shared<engine::TokenStream>(/*final_only=*/true);
    Must(engine_.Submit(std::move(input), stream).status());
    streams_.push_back(std::move(stream));
  }

  // Until all requests have ended. watch: called in between, every 50 µs.
  void Await(const std::function<void(const engine::EngineStats&)>& watch = nullptr) {
    for (const auto& stream : streams_) {
      std::optional<absl::Status> ended;
      while (!(ended = stream->Ended())) {
        while (stream->Take()) {
        }
        if (watch) watch(engine_.stats());
        absl::SleepFor(absl::Microseconds(50));
      }
      Must(*ended);
    }
    streams_.clear();
  }

 private:
  static engine::EngineOptions OptionsOf(const model::ModelConfig& model, int32_t sequences,
                                         int64_t step_tokens) {
    engine::EngineOptions options;
    options.max_step_tokens = step_tokens;
    options.max_running_sequences = sequences;
    options.prefix_cache = false;
    options.vocab_size = static_cast<int32_t>(model.vocab_size);
    options.context_length = model.context_length;
    if (model.vision) {
      options.images.merge = model.vision->merge;
      options.images.max_tokens = step_tokens;
      options.images.bidirectional = model.vision->bidirectional;
      options.images.fixed_side = model.vision->fixed_side;
    }
    return options;
  }

  Metrics metrics_{Metrics::Info{"bench", "none", "none", "cuda", "bf16"}};
  engine::Engine engine_;
  std::vector<std::shared_ptr<engine::TokenStream>> streams_;
  int64_t submitted_ = 0;
};

}  // namespace dorad::bench
