// Steps of a whole model on the GPU through the model runner, with random weights of a named shape:
// what the engine waits for, the building of batches and sampling included. As the engine does,
// each step begins while the one before it is computed and decodes what that one samples. --help
// tells the options.
//
// One JSON line a case: ms is the median step, floor_ms the bytes that must move over the copy
// bandwidth measured in the same run (decode only).
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/backends/cuda/adapter.h"
#include "server/backends/cuda/decoder.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/kv_layout.h"
#include "server/backends/cuda/model.h"
#include "server/backends/cuda/model_runner.h"
#include "server/engine/kv_needs.h"
#include "server/engine/model_runner.h"
#include "server/model/kv_groups.h"
#include "tests/bench/cuda_engine.h"
#include "tests/bench/cuda_model.h"
#include "tests/bench/model_shapes.h"

namespace dorad::cuda {
namespace {

using bench::Must;
using engine::StepSequence;

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Bytes a second, read and written, of a copy that no cache can hold.
double CopyBandwidth() {
  constexpr size_t kBytes = size_t{2} << 30;
  void* from = nullptr;
  void* to = nullptr;
  if (cudaMalloc(&from, kBytes) != cudaSuccess || cudaMalloc(&to, kBytes) != cudaSuccess) {
    std::exit(1);
  }
  std::vector<double> times;
  for (int i = 0; i < 12; ++i) {
    const double begin = Seconds();
    cudaMemcpy(to, from, kBytes, cudaMemcpyDeviceToDevice);
    cudaDeviceSynchronize();
    times.push_back(Seconds() - begin);
  }
  cudaFree(from);
  cudaFree(to);
  return 2.0 * kBytes / Median(times);
}

struct Options {
  std::string shape = "qwen3-8b";
  int64_t layers = 0;  // 0: as many as the shape has
  std::vector<int64_t> batch = {1, 32, 128, 256};
  std::vector<int64_t> adapters = {0, 1, 4, 8};
  int64_t rank = 384;
  std::vector<int64_t> ranks;
  int64_t context = 656;
  std::vector<int64_t> uses = {0};
  int64_t prefill = 4096;
  int64_t sequences = 0;
  int64_t length = 8192;
  std::string instruction_set = "auto";
  bool fp8_kv = false;
};

std::string Usage() {
  return absl::StrCat(R"(usage: cuda_step_bench [OPTION VALUE]...

Times steps of a model with random weights on the GPU; prints a JSON line for each case.

  --shape NAME         the model's sizes (qwen3-8b)
  --layers N           so many of its layers (all)
  --batch N,...        rows of a decode step (1,32,128,256)
  --adapters N,...     adapters that a step's rows are dealt to, 0 for the base alone (0,1,4,8);
                       batches with fewer rows than adapters are left out
  --rank R             of these adapters, a multiple of 8 (384)
  --ranks R,...        beside these cases one step whose rows are dealt to an adapter of each of
                       these ranks, 0 for the base: 16,64,384,768,0 (no such case)
  --context N          tokens before each row of a decode step (656)
  --uses N,...         different tokens that penalties count in each row of a decode step, 0 for no
                       penalties (0)
  --prefill N          tokens of the prefill step, 0 for none (4096)
  --sequences N        so many prompts through the engine, none of which begins with another's, and
                       256 tokens after each: the memory of their keys and values (0, for none)
  --length N           tokens of each of them at its end (8192)
  --isa NAME           of the kernels: auto, sm90 or mma (auto)
  --kv NAME            the KV cache: auto or fp8 (auto)

Shapes: )",
                      absl::StrJoin(bench::ModelShapeNames(), ", "), "\n");
}

[[noreturn]] void Refuse(const std::string& why) {
  std::fprintf(stderr, "cuda_step_bench: %s; --help tells the options\n", why.c_str());
  std::exit(2);
}

std::vector<int64_t> ParseList(const std::string& option, const std::string& text, int64_t least,
                               int64_t multiple_of) {
  std::vector<int64_t> values;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    int64_t value = 0;
    if (!absl::SimpleAtoi(part, &value) || value < least || value % multiple_of != 0) {
      Refuse(absl::StrCat(option, " ", text, ": ", part, " is not a number from ", least, " on",
                          multiple_of > 1 ? absl::StrCat(" that ", multiple_of, " divides") : ""));
    }
    values.push_back(value);
  }
  return values;
}

int64_t ParseOne(const std::string& option, const std::string& text, int64_t least,
                 int64_t multiple_of) {
  const std::vector<int64_t> values = ParseList(option, text, least, multiple_of);
  if (values.size() != 1) Refuse(absl::StrCat(option, " takes one number, not ", text));
  return values.front();
}

Options Parse(const std::vector<std::string>& arguments) {
  Options options;
  for (size_t i = 0; i < arguments.size(); i += 2) {
    const std::string& name = arguments[i];
    if (name == "--help") {
      std::fputs(Usage().c_str(), stdout);
      std::exit(0);
    }
    const bool last = i + 1 == arguments.size();
    const std::string value = last ? "" : arguments[i + 1];
    if (name == "--shape") {
      options.shape = value;
    } else if (name == "--layers") {
      options.layers = ParseOne(name, value, 1, 1);
    } else if (name == "--batch") {
      options.batch = ParseList(name, value, 1, 1);
    } else if (name == "--adapters") {
      options.adapters = ParseList(name, value, 0, 1);
    } else if (name == "--rank") {
      options.rank = ParseOne(name, value, 8, 8);
    } else if (name == "--ranks") {
      options.ranks = ParseList(name, value, 0, 8);
    } else if (name == "--context") {
      options.context = ParseOne(name, value, 1, 1);
    } else if (name == "--uses") {
      options.uses = ParseList(name, value, 0, 1);
    } else if (name == "--prefill") {
      options.prefill = ParseOne(name, value, 0, 1);
    } else if (name == "--sequences") {
      options.sequences = ParseOne(name, value, 0, 1);
    } else if (name == "--length") {
      options.length = ParseOne(name, value, 512, 1);
    } else if (name == "--isa") {
      if (value != "auto" && value != "sm90" && value != "mma") {
        Refuse(absl::StrCat(name, " takes auto, sm90 or mma, not ", value));
      }
      options.instruction_set = value;
    } else if (name == "--kv") {
      if (value != "auto" && value != "fp8") {
        Refuse(absl::StrCat(name, " takes auto or fp8, not ", value));
      }
      options.fp8_kv = value == "fp8";
    } else {
      Refuse(absl::StrCat("unknown option ", name));
    }
  }
  return options;
}

using Adapters = std::vector<std::unique_ptr<adapter::LoadedAdapter>>;

struct Case {
  int64_t batch = 1;
  int64_t tokens = 1;  // of each sequence
  int64_t context = 0;
  int64_t uses = 0;  // of each row's penalties
  // Dealt to the sequences in turns; null: the base. Not empty.
  std::vector<const adapter::LoadedAdapter*> deal = {nullptr};
  std::string label;  // what the JSON line says of the deal
};

class Bench {
 public:
  explicit Bench(Options options) : options_(std::move(options)) {
    model::ModelConfig config = Must(bench::ReadModelShape(options_.shape, options_.layers));
    config.fp8_kv = options_.fp8_kv;
    Must(OpenDevice().status());
    bandwidth_ = CopyBandwidth();
    const kernels::KernelIsa isa = Must(ChooseIsa(options_.instruction_set));
    model_ = Must(CudaModel::Random(config, 1, &ledger_, isa));
    const int64_t most = *std::max_element(options_.adapters.begin(), options_.adapters.end());
    for (int64_t i = 0; i < most; ++i) adapters_.push_back(MakeAdapter(options_.rank));
    for (const int64_t rank : options_.ranks) {
      mixed_.push_back(rank > 0 ? MakeAdapter(rank) : nullptr);
    }
    const int64_t batch = *std::max_element(options_.batch.begin(), options_.batch.end());
    const int64_t rows = std::max(batch, options_.prefill);
    const int64_t pages =
        batch * (bench::PagesOf(config, options_.context + 80) + StateLayoutOf(config).pages()) +
        bench::PagesOf(config, options_.prefill);
    const int64_t positions = std::max<int64_t>(16384, options_.context + 64);
    runner_ = Must(MakeCudaModelRunner(
        model_.get(), {pages, std::max(positions, options_.prefill), rows, batch}, &ledger_));
    std::printf(
        "{\"shape\": \"%s\", \"layers\": %lld, \"isa\": \"%s\", \"copy_TBps\": %.3f, "
        "\"weights_GB\": %.3f, "
        "\"state_MB\": %.1f}\n",
        options_.shape.c_str(), static_cast<long long>(config.num_layers()),
        std::string(NameOf(isa)).c_str(), bandwidth_ / 1e12, model_->bytes() / 1e9,
        StateBytes() / 1e6);
  }

  void Run() {
    for (const int64_t adapters : options_.adapters) {
      Case c;
      if (adapters > 0) c.deal = Deal(adapters_, adapters);
      c.label = absl::StrCat("\"adapters\": ", adapters);
      if (adapters > 0) absl::StrAppend(&c.label, ", \"rank\": ", options_.rank);
      Decode("decode", c);
      if (options_.prefill > 0 && adapters <= 1) Prefill(c);
    }
    if (!mixed_.empty()) {
      Case c;
      c.deal = Deal(mixed_, mixed_.size());
      c.label = absl::StrCat("\"ranks\": [", absl::StrJoin(options_.ranks, ", "), "]");
      Decode("mixed decode", c);
    }
    if (options_.sequences > 0) CountKv();
  }

 private:
  // Of sequences that all decode, near the end of the last one's prompt.
  void CountKv() {
    constexpr int64_t kAnswer = 256;
    const model::ModelConfig& config = model_->config();
    runner_.reset();
    const engine::KvNeeds needs{model::KvGroups(config).windows, StateLayoutOf(config).pages(),
                                bench::kStepTokens};
    runner_ = Must(MakeCudaModelRunner(model_.get(),
                                       {options_.sequences * needs.PagesFor(options_.length),
                                        options_.length, bench::kStepTokens, options_.sequences},
                                       &ledger_));
    bench::BenchEngine engine(config, static_cast<int32_t>(options_.sequences), std::move(runner_));
    for (int64_t i = 0; i < options_.sequences; ++i) {
      std::vector<engine::TokenId> prompt;
      for (int64_t t = 0; t < options_.length - kAnswer; ++t) {
        prompt.push_back(static_cast<engine::TokenId>((i * 7919 + t * 104729) % config.vocab_size));
      }
      engine.Submit(std::move(prompt), {}, nullptr, kAnswer);
    }
    int64_t most = 0, last = 0;
    engine.Await([&](const engine::EngineStats& stats) {
      most = std::max(most, stats.kv_pages_used);
      if (stats.running_sequences == options_.sequences && stats.queued_requests == 0) {
        last = stats.kv_pages_used;
      }
    });
    double layers = 0.0;  // with keys and values
    for (const model::LayerSpec& layer : config.layers) layers += layer.delta ? 0.0 : 1.0;
    const double page = KvPageBytes(config);
    const double kept = page / model::KvGroups(config).slots * layers *
                        engine::BlocksOf(options_.length) * options_.sequences;
    std::printf(
        "{\"work\": \"keys and values\", \"sequences\": %lld, \"length\": %lld, "
        "\"in_use_GB\": %.2f, \"most_GB\": %.2f, \"without_windows_GB\": %.2f}\n",
        static_cast<long long>(options_.sequences), static_cast<long long>(options_.length),
        last * page / 1e9, most * page / 1e9, kept / 1e9);
    std::fflush(stdout);
  }

  std::unique_ptr<adapter::LoadedAdapter> MakeAdapter(int64_t rank) {
    ++made_;
    return std::make_unique<adapter::LoadedAdapter>(
        "bench", made_, adapter::AdapterSummary(),
        Must(MakeRandomAdapter(*model_, static_cast<int>(rank),
                               static_cast<uint32_t>(1000 * made_ + 7), &ledger_)));
  }

  static std::vector<const adapter::LoadedAdapter*> Deal(const Adapters& adapters, size_t count) {
    std::vector<const adapter::LoadedAdapter*> deal;
    for (size_t i = 0; i < count; ++i) deal.push_back(adapters[i].get());
    return deal;
  }

  // Of the keys and values that one row of a decode step attends to, its own included.
  double CacheBytes(int64_t context) const {
    const model::ModelConfig& config = model_->config();
    double rows = 0.0;
    for (const model::LayerSpec& layer : config.layers) {
      if (layer.delta) continue;
      const int64_t window = layer.attention.window;
      rows += window > 0 ? std::min(window, context + 1) : context + 1;
    }
    return rows * KvPageBytes(config) / engine::kKvPageTokens / model::KvGroups(config).slots;
  }

  // Of a sequence's recurrent state, which a step reads and writes.
  double StateBytes() const {
    const model::ModelConfig& config = model_->config();
    return 1.0 * StateLayoutOf(config).pages() * KvPageBytes(config);
  }

  // Weights and the adapters of the case once, keys and values of the context, states.
  double Floor(const Case& c) const {
    const model::ModelConfig& config = model_->config();
    double bytes = model_->bytes();
    // Of an embedding that is not the head as well a step reads a few rows only.
    if (!config.tied_embeddings) bytes -= 2.0 * config.vocab_size * config.hidden_size;
    for (const adapter::LoadedAdapter* adapter : c.deal) {
      if (adapter == nullptr) continue;
      bytes += static_cast<const CudaAdapterWeights&>(adapter->weights()).bytes();
    }
    bytes += c.batch * (CacheBytes(c.context) + 2.0 * StateBytes());
    // Bandwidth counts a copy's reads and writes; reads alone go as fast.
    return bytes / bandwidth_;
  }

  void Decode(const char* work, Case c) {
    c.context = options_.context;
    for (const int64_t batch : options_.batch) {
      if (c.deal.size() > static_cast<size_t>(batch)) continue;
      c.batch = batch;
      for (const int64_t uses : options_.uses) {
        c.uses = uses;
        const double ms = 1e3 * Measure(c);
        const double floor = 1e3 * Floor(c);
        std::printf(
            "{\"work\": \"%s\", \"batch\": %lld, %s, \"context\": %lld, \"uses\": %lld, "
            "\"ms\": %.3f, \"floor_ms\": %.3f, \"share\": %.2f}\n",
            work, static_cast<long long>(batch), c.label.c_str(), static_cast<long long>(c.context),
            static_cast<long long>(uses), ms, floor, floor / ms);
        std::fflush(stdout);
      }
    }
  }

  void Prefill(Case c) {
    c.tokens = options_.prefill;
    std::printf("{\"work\": \"prefill\", \"tokens\": %lld, %s, \"ms\": %.2f}\n",
                static_cast<long long>(c.tokens), c.label.c_str(), 1e3 * Measure(c));
    std::fflush(stdout);
  }

  // Seconds of the median step.
  double Measure(const Case& c) {
    std::vector<std::vector<engine::TokenId>> tokens(c.batch);
    std::vector<std::vector<int32_t>> pages(c.batch), states(c.batch);
    std::vector<engine::SampleWant> wants(c.batch);
    std::vector<StepSequence> sequences(c.batch);
    engine::LogitParams penalties;
    penalties.frequency_penalty = 0.1f;
    std::vector<engine::TokenUse> uses;
    for (int64_t i = 0; i < c.uses; ++i) {
      const int64_t id = i * 7919 % model_->config().vocab_size;  // a prime: all differ
      uses.push_back({static_cast<int32_t>(id), engine::TokenUse::kGenerated});
    }
    const int64_t length = c.context + c.tokens;
    int32_t page = 0;
    for (int64_t i = 0; i < c.batch; ++i) {
      for (int64_t t = 0; t < c.tokens; ++t) {
        tokens[i].push_back(
            static_cast<int32_t>((i * 7919 + t * 104729) % model_->config().vocab_size));
      }
      const auto groups = static_cast<int64_t>(runner_->windows().size());
      const int64_t count = engine::BlocksOf(length) * groups;
      for (int64_t p = 0; p < count; ++p) pages[i].push_back(page++);
      for (int64_t p = 0; p < runner_->state_pages(); ++p) states[i].push_back(page++);
      wants[i].sampling.temperature = 0.0f;
      wants[i].position = length;
      if (c.uses > 0) wants[i].logits = &penalties;
      wants[i].uses = uses;
      sequences[i].tokens = tokens[i];
      sequences[i].position = c.context;
      sequences[i].pages = pages[i];
      sequences[i].state = states[i];
      sequences[i].samples = {&wants[i], 1};
      sequences[i].adapter = c.deal[i % c.deal.size()];
    }
    std::vector<double> times;
    Must(runner_->Begin(sequences));
    if (c.tokens == 1) {
      for (int64_t i = 0; i < c.batch; ++i) sequences[i].follows = static_cast<int32_t>(i);
    }
    const double end = Seconds() + 1.0;
    double last = Seconds();
    for (int i = 0; i < 200 && (i < 8 || Seconds() < end); ++i) {
      Must(runner_->Begin(sequences));
      Must(runner_->Finish().status());
      const double now = Seconds();
      times.push_back(now - last);
      last = now;
    }
    Must(runner_->Finish().status());
    return Median({times.begin() + 3, times.end()});
  }

  const Options options_;
  MemoryLedger ledger_;
  double bandwidth_ = 0.0;
  std::unique_ptr<CudaModel> model_;
  Adapters adapters_;
  Adapters mixed_;  // as options_.ranks; null where that is 0
  int made_ = 0;
  std::unique_ptr<engine::ModelRunner> runner_;
};

}  // namespace
}  // namespace dorad::cuda

int main(int argc, char** argv) {
  dorad::cuda::Bench(dorad::cuda::Parse({argv + 1, argv + argc})).Run();
  return 0;
}
