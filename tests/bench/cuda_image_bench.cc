// Images on the GPU through the model runner, with random weights of a vision-language model's
// shape: the time of one image, what the steps of a running batch notice of a series of them, and
// prompts of an image each through the engine.
//
//   cuda_image_bench [--shape qwen3-vl-8b] [--layers 0] [--adapters 0,1] [--rank 384] [--batch 32]
//                    [--steps 400] [--patches 0] [--requests 32]
//                    [--step-tokens 2048]
//
// One JSON line a case; times in milliseconds. TFLOPs counts the tower's products and attention.
// "image": one in pieces; "images": one, and up to 64 x 64 patches eight together, with nothing
// else to run, for each. adapters: 0 for the base model alone, 1 for one adapter of the rank.
// patches: of the one image that is timed, 0: of all sizes that the model takes, -1: none. steps: 0
// for none. A step begins while the one before it is computed, with a piece of an image between
// them, as the engine does.
//
// requests: each a prompt of an image of 64 x 64 patches with 16 tokens of text on either side, 0
// for none. "image prompt": one that comes alone, from pixels in fp32 to its first token. "image
// prompts": all at once, to the last one's first token, for each of them. Pixels are rounded to
// bf16 before they are submitted, as the server's calls do. step-tokens: engine.max_step_tokens.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/backends/cuda/adapter.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/kv_layout.h"
#include "server/backends/cuda/model.h"
#include "server/backends/cuda/model_runner.h"
#include "server/engine/images.h"
#include "server/engine/kv_needs.h"
#include "tests/bench/cuda_engine.h"
#include "tests/bench/cuda_model.h"
#include "tests/bench/model_shapes.h"

namespace dorad::cuda {
namespace {

using bench::Must;
using bench::Quantile;

double Milliseconds() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class Bench {
 public:
  Bench(const std::string& shape, const std::string& adapters,
        std::map<std::string, int64_t> options)
      : options_(std::move(options)) {
    Must(OpenDevice().status());
    model_ = Must(CudaModel::Random(
        Must(bench::ReadModelShape(shape, options_["--layers"], /*tower=*/true)), 1, &ledger_));
    if (adapters != "1") adapters_.push_back(nullptr);
    if (adapters != "0") {
      adapters_.push_back(std::make_shared<adapter::LoadedAdapter>(
          "bench", 1, adapter::AdapterSummary(),
          Must(MakeRandomAdapter(*model_, static_cast<int>(options_["--rank"]), 7, &ledger_))));
    }
    const int64_t batch = options_["--batch"];
    // Of a sequence that decodes, or of one with an image.
    const int64_t states = StateLayoutOf(model_->config()).pages();
    const int64_t prompt = MakeImage(kSide, kSide, DType::kBF16).span() + 2 * kText + 1;
    const int64_t pages = bench::PagesOf(model_->config(), std::max(kContext + 16, prompt)) +
                          (options_["--requests"] > 0 ? engine::kMostStates : 1) * states;
    runner_ = Must(MakeCudaModelRunner(
        model_.get(),
        {batch * pages, 4096, std::max<int64_t>(4096, options_["--step-tokens"]), batch},
        &ledger_));
    std::printf("{\"shape\": \"%s\", \"layers\": %lld, \"weights_GB\": %.3f}\n", shape.c_str(),
                static_cast<long long>(model_->config().num_layers()), model_->bytes() / 1e9);
  }

  void Run() {
    for (const auto& owned : adapters_) {
      const adapter::LoadedAdapter* const adapter = owned.get();
      for (const auto& [height, width] :
           {std::pair(16, 16), {32, 32}, {kSide, kSide}, {128, 64}, {128, 128}}) {
        const int64_t side = model_->config().vision->fixed_side;
        if (side != 0 && (height != side || width != side)) continue;
        if (options_["--patches"] % (height * width) == 0) TimeImage(height, width, adapter);
      }
      if (options_["--steps"] > 20) TimeSteps(adapter);
    }
    if (options_["--requests"] == 0) return;
    bench::BenchEngine engine(model_->config(), static_cast<int32_t>(options_["--batch"]),
                              std::move(runner_), options_["--step-tokens"]);
    for (const auto& adapter : adapters_) TimeRequests(adapter, &engine);
  }

 private:
  using Adapter = std::shared_ptr<const adapter::LoadedAdapter>;

  static constexpr int64_t kContext = 656;
  static constexpr int64_t kSide = 64;
  static constexpr int64_t kText = 16;  // on either side of an image in a prompt

  engine::Image MakeImage(int64_t height, int64_t width, DType dtype) {
    const model::VisionConfig& vision = *model_->config().vision;
    engine::Image image;
    image.dtype = dtype;
    image.height = height;
    image.width = width;
    image.rows = height / vision.merge;
    image.columns = width / vision.merge;
    image.row_breaks = vision.row_breaks;
    image.bidirectional = vision.bidirectional;
    const int64_t bytes = dtype == DType::kBF16 ? 2 : 4;
    image.pixels.assign(height * width * vision.patch_elements() * bytes, '\x3c');  // 0.0115
    image.key = --next_key_;
    image.sha256 = std::to_string(image.key);
    return image;
  }

  // Of all pieces; returns their longest.
  double Encode(absl::Span<const engine::Image* const> images,
                const adapter::LoadedAdapter* adapter, bool alone, int* pieces) {
    double longest = 0.0;
    for (*pieces = 0; !images.empty(); ++*pieces) {
      const double begin = Milliseconds();
      images.remove_prefix(Must(runner_->EncodeImages(images, adapter, alone)).size());
      longest = std::max(longest, Milliseconds() - begin);
    }
    return longest;
  }

  double Operations(const engine::Image& image) const {
    const model::VisionConfig& v = *model_->config().vision;
    const auto patches = static_cast<double>(image.height * image.width);
    double linears = 0.0;
    for (const adapter::BaseModule& module : model_->modules().all()) {
      const int id = static_cast<int>(&module - model_->modules().all().data());
      if (id <= model_->config().head) continue;
      const bool is_merger = module.cols == v.merged_width();
      linears +=
          2.0 * module.rows * module.cols * (is_merger ? patches / (v.merge * v.merge) : patches);
    }
    return linears + 4.0 * patches * patches * v.width * static_cast<double>(v.blocks.size());
  }

  void TimeImage(int64_t height, int64_t width, const adapter::LoadedAdapter* adapter) {
    std::vector<double> times, longest;
    int pieces = 0;
    engine::Image image = MakeImage(height, width, DType::kBF16);
    for (int i = 0; i < 8; ++i) {
      image.key = --next_key_;
      const double begin = Milliseconds();
      const double most = Encode({&image}, adapter, /*alone=*/false, &pieces);
      if (i == 0) continue;
      times.push_back(Milliseconds() - begin);
      longest.push_back(most);
    }
    const double ms = Quantile(times, 0.5);
    std::printf(
        "{\"work\": \"image\", \"rank\": %lld, \"patches\": %lld, \"tokens\": %lld, \"ms\": %.2f, "
        "\"pieces\": %d, \"longest_piece_ms\": %.2f, \"TFLOPs\": %.0f}\n",
        static_cast<long long>(adapter == nullptr ? 0 : options_["--rank"]),
        static_cast<long long>(height * width), static_cast<long long>(image.tokens()), ms, pieces,
        Quantile(longest, 0.5), Operations(image) / ms / 1e9);
    TimeAlone({image}, adapter);
    if (height * width <= kSide * kSide) TimeAlone(std::vector<engine::Image>(8, image), adapter);
    std::fflush(stdout);
  }

  void TimeAlone(std::vector<engine::Image> images, const adapter::LoadedAdapter* adapter) {
    const auto count = static_cast<double>(images.size());
    std::vector<const engine::Image*> all;
    for (const engine::Image& image : images) all.push_back(&image);
    std::vector<double> times;
    int calls = 0;
    for (int i = 0; i < 5; ++i) {
      for (engine::Image& image : images) image.key = --next_key_;
      const double begin = Milliseconds();
      Encode(all, adapter, /*alone=*/true, &calls);
      if (i > 0) times.push_back((Milliseconds() - begin) / count);
    }
    const double ms = Quantile(times, 0.5);
    std::printf(
        "{\"work\": \"images\", \"rank\": %lld, \"patches\": %lld, \"count\": %zu, \"ms\": %.2f, "
        "\"calls\": %d, \"TFLOPs\": %.0f}\n",
        static_cast<long long>(adapter == nullptr ? 0 : options_["--rank"]),
        static_cast<long long>(images[0].height * images[0].width), images.size(), ms, calls,
        Operations(images[0]) / ms / 1e9);
  }

  // Decode steps alone, and with a piece of an image of 64 x 64 patches between any two.
  void TimeSteps(const adapter::LoadedAdapter* adapter) {
    engine::Image image = MakeImage(kSide, kSide, DType::kBF16);
    for (const bool with_images : {false, true}) {
      bench::DecodeStep step(options_["--batch"], kContext, *runner_, adapter);
      std::vector<double> times;
      int images = 0;
      image.key = --next_key_;
      Must(runner_->Begin(step.sequences(/*behind=*/false)));
      const double first = Milliseconds();
      double last = first;
      for (int64_t i = 0; i < options_["--steps"]; ++i) {
        Must(runner_->Begin(step.sequences(/*behind=*/true)));
        if (with_images &&
            !Must(runner_->EncodeImages({&image}, adapter, /*alone=*/false)).empty()) {
          ++images;
          image.key = --next_key_;
        }
        Must(runner_->Finish().status());
        const double now = Milliseconds();
        if (i >= 20) times.push_back(now - last);
        last = now;
      }
      Must(runner_->Finish().status());
      std::printf(
          "{\"work\": \"%s\", \"rank\": %lld, \"batch\": %lld, \"p50_ms\": %.2f, \"p99_ms\": %.2f, "
          "\"longest_ms\": %.2f, \"images_per_s\": %.1f}\n",
          with_images ? "steps and images" : "steps",
          static_cast<long long>(adapter == nullptr ? 0 : options_["--rank"]),
          static_cast<long long>(options_["--batch"]), Quantile(times, 0.5), Quantile(times, 0.99),
          Quantile(times, 1.0), 1e3 * images / (last - first));
      std::fflush(stdout);
    }
  }

  // Milliseconds until so many prompts of an image each have their first tokens.
  double FirstTokens(int64_t requests, const Adapter& adapter, bench::BenchEngine* engine) {
    std::vector<std::shared_ptr<engine::Image>> images;  // made before the clock starts
    for (int64_t i = 0; i < requests; ++i) {
      images.push_back(std::make_shared<engine::Image>(MakeImage(kSide, kSide, DType::kF32)));
    }
    const double begin = Milliseconds();
    for (const auto& image : images) {
      image->RoundPixels();
      std::vector<engine::TokenId> prompt;
      for (int64_t i = 0; i < image->span() + 2 * kText; ++i) {
        const bool in_image = i >= kText && i < kText + image->span();
        const bool is_text = !in_image || image->is_break(i - kText);
        prompt.push_back(is_text ? static_cast<engine::TokenId>(100 + i)
                                 : model_->config().vision->image_token_id);
      }
      engine->Submit(std::move(prompt), {{kText, image}}, adapter, 1);
    }
    engine->Await();
    return Milliseconds() - begin;
  }

  void TimeRequests(const Adapter& adapter, bench::BenchEngine* engine) {
    const int64_t requests = options_["--requests"];
    std::vector<double> alone, together;
    for (int i = 0; i < 9; ++i) {
      const double ms = FirstTokens(1, adapter, engine);
      if (i > 1) alone.push_back(ms);
    }
    for (int i = 0; i < 3; ++i) {
      together.push_back(FirstTokens(requests, adapter, engine) / static_cast<double>(requests));
    }
    const auto rank = static_cast<long long>(adapter == nullptr ? 0 : options_["--rank"]);
    const double each = Quantile(together, 0.5);
    std::printf("{\"work\": \"image prompt\", \"rank\": %lld, \"ms\": %.2f}\n", rank,
                Quantile(alone, 0.5));
    std::printf(
        "{\"work\": \"image prompts\", \"rank\": %lld, \"count\": %lld, \"ms\": %.2f, "
        "\"images_per_s\": %.1f}\n",
        rank, static_cast<long long>(requests), each, 1e3 / each);
    std::fflush(stdout);
  }

  std::map<std::string, int64_t> options_;
  MemoryLedger ledger_;
  std::unique_ptr<CudaModel> model_;
  std::vector<Adapter> adapters_;  // nullptr: the base
  std::unique_ptr<engine::ModelRunner> runner_;
  engine::TokenId next_key_ = -2;
};

}  // namespace
}  // namespace dorad::cuda

int main(int argc, char** argv) {
  std::string shape = "qwen3-vl-8b", adapters = "0,1";
  std::map<std::string, int64_t> options = {
      {"--layers", 0},  {"--rank", 384},    {"--batch", 32},        {"--steps", 400},
      {"--patches", 0}, {"--requests", 32}, {"--step-tokens", 2048}};
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--shape") == 0) {
      shape = argv[i + 1];
    } else if (std::strcmp(argv[i], "--adapters") == 0) {
      adapters = argv[i + 1];
    } else if (options.count(argv[i]) > 0) {
      options[argv[i]] = std::atoll(argv[i + 1]);
    } else {
      std::fprintf(stderr, "%s is no option\n", argv[i]);
      return 2;
    }
  }
  dorad::cuda::Bench(shape, adapters, std::move(options)).Run();
}
