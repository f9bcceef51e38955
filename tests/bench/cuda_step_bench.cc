// Steps of a whole model on the GPU through the model runner, with random weights of Qwen3-8B's
// shape: what the engine waits for, the building of batches and sampling included. As the engine
// does, each step begins while the one before it is computed and decodes what that one samples.
//
//   cuda_step_bench [--batch 1,32,128,256] [--adapters 0,1,4,8] [--rank 384] [--context 656]
//                   [--prefill 4096] [--layers 36]
//
// One JSON line a case: ms is the median step, floor_ms the bytes that must move over the copy
// bandwidth measured in the same run (decode only).
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "server/cuda/adapter.h"
#include "server/cuda/cuda_model_runner.h"
#include "server/cuda/decoder.h"
#include "server/cuda/device.h"
#include "server/cuda/model.h"
#include "server/engine/model_runner.h"
#include "tests/bench/cuda_model.h"

namespace dorad::cuda {
namespace {

using bench::Must;
using bench::Qwen3_8B;
using engine::StepSequence;
using Lists = std::map<std::string, std::vector<int64_t>>;

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

struct Case {
  int64_t batch = 1;
  int64_t adapters = 0;
  int64_t tokens = 1;  // of each sequence
  int64_t context = 0;
};

class Bench {
 public:
  explicit Bench(Lists options) : options_(std::move(options)) {
    Must(OpenDevice().status());
    bandwidth_ = CopyBandwidth();
    model_ = Must(CudaModel::Random(Qwen3_8B(options_["layers"][0]), 1, &ledger_));
    const int64_t most =
        *std::max_element(options_["adapters"].begin(), options_["adapters"].end());
    for (int64_t i = 0; i < most; ++i) {
      adapters_.push_back(std::make_unique<adapter::LoadedAdapter>(
          "bench", i + 1, adapter::AdapterSummary(),
          Must(MakeRandomAdapter(*model_, static_cast<int>(options_["rank"][0]),
                                 static_cast<uint32_t>(1000 * i + 7), &ledger_))));
    }
    const int64_t batch = *std::max_element(options_["batch"].begin(), options_["batch"].end());
    const int64_t rows = std::max(batch, options_["prefill"][0]);
    pages_ =
        (batch * (options_["context"][0] + 64) + options_["prefill"][0]) / engine::kKvPageTokens +
        2 * batch;
    runner_ = Must(MakeCudaModelRunner(model_.get(), {pages_, 16384, rows, batch}, &ledger_));
    std::printf("{\"copy_TBps\": %.3f, \"weights_GB\": %.3f}\n", bandwidth_ / 1e12,
                model_->bytes() / 1e9);
  }

  void Run() {
    for (const int64_t adapters : options_["adapters"]) {
      for (const int64_t batch : options_["batch"]) {
        if (adapters > batch) continue;
        Report(Case{batch, adapters, 1, options_["context"][0]});
      }
      if (options_["prefill"][0] > 0 && adapters <= 1) {
        Report(Case{1, adapters, options_["prefill"][0], 0});
      }
    }
  }

 private:
  // Weights and adapters once, keys and values of the context.
  double Floor(const Case& c) const {
    const model::ModelConfig& config = model_->config();
    double bytes = model_->bytes() - 2.0 * config.vocab_size * config.hidden_size;
    for (int64_t i = 0; i < c.adapters; ++i) {
      bytes += static_cast<const CudaAdapterWeights&>(adapters_[i]->weights()).bytes();
    }
    bytes += c.batch * (c.context + 1) * double(KvPageBytes(config)) / engine::kKvPageTokens;
    // Bandwidth counts a copy's reads and writes; reads alone go as fast.
    return bytes / bandwidth_;
  }

  void Report(const Case& c) {
    std::vector<std::vector<engine::TokenId>> tokens(c.batch);
    std::vector<std::vector<int32_t>> pages(c.batch);
    std::vector<engine::SampleWant> wants(c.batch);
    std::vector<StepSequence> sequences(c.batch);
    const int64_t length = c.context + c.tokens;
    int32_t page = 0;
    for (int64_t i = 0; i < c.batch; ++i) {
      for (int64_t t = 0; t < c.tokens; ++t) {
        tokens[i].push_back(static_cast<int32_t>((i * 7919 + t * 104729) % 151936));
      }
      for (int64_t p = 0; p * engine::kKvPageTokens < length; ++p) pages[i].push_back(page++);
      wants[i].sampling.temperature = 0.0f;
      wants[i].position = length;
      sequences[i].tokens = tokens[i];
      sequences[i].position = c.context;
      sequences[i].pages = pages[i];
      sequences[i].sample = &wants[i];
      if (c.adapters > 0) sequences[i].adapter = adapters_[i % c.adapters].get();
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
    const double ms = 1e3 * Median({times.begin() + 3, times.end()});
    if (c.tokens == 1) {
      const double floor = 1e3 * Floor(c);
      std::printf(
          "{\"work\": \"decode\", \"batch\": %lld, \"adapters\": %lld, \"context\": %lld, "
          "\"ms\": %.3f, \"floor_ms\": %.3f, \"share\": %.2f}\n",
          static_cast<long long>(c.batch), static_cast<long long>(c.adapters),
          static_cast<long long>(c.context), ms, floor, floor / ms);
    } else {
      std::printf("{\"work\": \"prefill\", \"tokens\": %lld, \"adapters\": %lld, \"ms\": %.2f}\n",
                  static_cast<long long>(c.tokens), static_cast<long long>(c.adapters), ms);
    }
    std::fflush(stdout);
  }

  Lists options_;
  MemoryLedger ledger_;
  double bandwidth_ = 0.0;
  std::unique_ptr<CudaModel> model_;
  std::vector<std::unique_ptr<adapter::LoadedAdapter>> adapters_;
  int64_t pages_ = 0;
  std::unique_ptr<engine::ModelRunner> runner_;
};

}  // namespace
}  // namespace dorad::cuda

int main(int argc, char** argv) {
  dorad::cuda::Lists options = {
      {"batch", {1, 32, 128, 256}}, {"adapters", {0, 1, 4, 8}}, {"rank", {384}},
      {"context", {656}},           {"prefill", {4096}},        {"layers", {36}}};
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = std::string(argv[i]).substr(2);
    if (options.count(name) == 0) {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 1;
    }
    options[name].clear();
    for (const auto& part : absl::StrSplit(argv[i + 1], ',')) {
      options[name].push_back(std::atoll(std::string(part).c_str()));
    }
  }
  dorad::cuda::Bench(std::move(options)).Run();
  return 0;
}
