// Loading an adapter on the GPU, with random weights and tensors of Qwen3-8B's shape: how long a
// build takes from each place where the tensors may lie, and what the steps of a running batch
// notice of it.
//
//   cuda_adapter_bench [--rank 384] [--layers 36] [--batch 32] [--context 656] [--threads 8]
//                      [--piece_kib 2048] [--window 16] [--repeats 7] [--fp32 1]
//
// One JSON line a case; medians in milliseconds. "file" is mapped page cache. "publish" goes all
// the way from a folder in /dev/shm to an active version: reading, validation and digest included.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "kernels/random/fill.h"
#include "server/adapter/publish/loader.h"
#include "server/adapter/registry/registry.h"
#include "server/backends/cuda/adapter.h"
#include "server/backends/cuda/adapter_builder.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/host_copies.h"
#include "server/backends/cuda/kv_layout.h"
#include "server/backends/cuda/model.h"
#include "server/backends/cuda/model_runner.h"
#include "server/backends/cuda/pinned_pages.h"
#include "server/platform/thread_pool.h"
#include "tests/bench/cuda_model.h"
#include "tests/bench/model_shapes.h"

namespace dorad::cuda {
namespace {

using adapter::AdapterTensors;
using adapter::BuiltAdapter;
using adapter::TensorPlace;
using bench::Must;
using bench::Quantile;
using Options = std::map<std::string, int64_t>;

double Milliseconds(absl::Duration duration) { return absl::ToDoubleMilliseconds(duration); }

// The tensors of one adapter at `base`, one behind the other, as a file has them.
class Tensors {
 public:
  Tensors(const CudaModel& model, int rank, DType factors) {
    const int count = model.config().embedding;
    magnitudes_.reserve(static_cast<size_t>(count));
    for (int id = 0; id < count; ++id) {
      const adapter::BaseModule& module = model.modules().all()[id];
      adapter::ModuleTensors tensors;
      tensors.target.module_id = id;
      tensors.target.rank = rank;
      tensors.target.scale = 0.5;
      tensors.a = Take(factors, {rank, module.cols});
      tensors.b = Take(factors, {module.rows, rank});
      magnitudes_.push_back(Take(DType::kF32, {module.rows}));
      tensors.magnitude = &magnitudes_.back();
      modules_.push_back(tensors);
    }
  }

  int64_t bytes() const { return bytes_; }

  // A PEFT folder whose data is what lies at `data`.
  void WriteFolder(const CudaModel& model, const std::string& folder, const void* data) const {
    static constexpr const char* kParts[] = {"lora_A.weight", "lora_B.weight",
                                             "lora_magnitude_vector"};
    std::string header = "{";
    for (size_t i = 0; i < offsets_.size(); ++i) {
      const adapter::ModuleTensors& module = modules_[i / 3];
      const TensorView& view = i % 3 == 0 ? module.a : i % 3 == 1 ? module.b : magnitudes_[i / 3];
      absl::StrAppend(&header, i == 0 ? "" : ",", "\"base_model.model.",
                      model.modules().all()[module.target.module_id].name, ".", kParts[i % 3],
                      "\":{\"dtype\":\"", NameOf(view.dtype), "\",\"shape\":[",
                      absl::StrJoin(view.shape, ","), "],\"data_offsets\":[", offsets_[i], ",",
                      i + 1 < offsets_.size() ? offsets_[i + 1] : bytes_, "]}");
    }
    header += "}";
    const uint64_t length = header.size();
    std::ofstream file(folder + "/adapter_model.safetensors", std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof(length));
    file << header;
    file.write(static_cast<const char*>(data), bytes_);
    const int rank = modules_[0].target.rank;
    std::ofstream(folder + "/adapter_config.json")
        << "{\"peft_type\": \"LORA\", \"task_type\": \"CAUSAL_LM\", \"use_dora\": true, \"r\": "
        << rank << ", \"lora_alpha\": " << rank / 2
        << ", \"target_modules\": [\"q_proj\", \"k_proj\", \"v_proj\", \"o_proj\", \"gate_proj\", "
           "\"up_proj\", \"down_proj\"]}";
    if (!file.flush()) std::exit(1);
  }

  AdapterTensors At(const void* base, TensorPlace place) {
    const auto shift = [base](TensorView& view, int64_t at) {
      view.bytes = {static_cast<const std::byte*>(base) + at,
                    static_cast<size_t>(view.num_elements()) * SizeOf(view.dtype)};
    };
    AdapterTensors tensors;
    tensors.place = place;
    for (size_t i = 0; i < modules_.size(); ++i) {
      shift(modules_[i].a, offsets_[3 * i]);
      shift(modules_[i].b, offsets_[3 * i + 1]);
      shift(magnitudes_[i], offsets_[3 * i + 2]);
    }
    tensors.modules = modules_;
    return tensors;
  }

  // Random factors and magnitudes of 1, made on the device at `base`.
  void Fill(void* base) {
    const AdapterTensors tensors = At(base, TensorPlace::kDevice);
    uint32_t seed = 1;
    for (const adapter::ModuleTensors& module : tensors.modules) {
      for (const TensorView* view : {&module.a, &module.b}) {
        // As fp32, a pair of bf16 numbers is one of the size of the second.
        Must(ToStatus(kernels::FillRandom(
                          const_cast<__nv_bfloat16*>(
                              reinterpret_cast<const __nv_bfloat16*>(view->bytes.data())),
                          static_cast<int64_t>(view->bytes.size() / 2), 0.035f, seed++, nullptr),
                      "filling"));
      }
      Must(ToStatus(kernels::FillConstant(const_cast<float*>(reinterpret_cast<const float*>(
                                              module.magnitude->bytes.data())),
                                          module.magnitude->num_elements(), 1.0f, nullptr),
                    "filling"));
    }
    Must(ToStatus(cudaDeviceSynchronize(), "filling"));
  }

 private:
  TensorView Take(DType dtype, std::vector<int64_t> shape) {
    const TensorView view{dtype, std::move(shape), {}};
    offsets_.push_back(bytes_);
    bytes_ += view.num_elements() * static_cast<int64_t>(SizeOf(dtype));
    return view;
  }

  std::vector<adapter::ModuleTensors> modules_;
  std::vector<TensorView> magnitudes_;
  std::vector<int64_t> offsets_;
  int64_t bytes_ = 0;
};

// A new file in memory, mapped; gone with the process.
class SharedFile {
 public:
  explicit SharedFile(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    const int file = memfd_create("adapter", 0);
    if (file < 0 || ftruncate(file, bytes) != 0) std::exit(1);
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (data_ == MAP_FAILED) std::exit(1);
  }
  ~SharedFile() { munmap(data_, bytes_); }
  void* data() const { return data_; }

 private:
  const size_t bytes_;
  void* data_ = nullptr;
};

// Publishes the adapter in a temporary folder again and again, each time as a new version.
class Publisher {
 public:
  Publisher(const CudaModel* model, adapter::AdapterBuilder* builder)
      : pool_(1, /*nice=*/10),
        residency_([this] {
          adapter::Residency::Options options;
          options.executor = [this](std::function<void()> task) { pool_.Submit(std::move(task)); };
          return options;
        }()),
        registry_([this] {
          adapter::AdapterRegistry::Options options;
          options.executor = [this](std::function<void()> task) { pool_.Submit(std::move(task)); };
          return options;
        }()),
        loader_({}, &pool_, &model->modules(), builder, &residency_, &registry_, nullptr) {
    char folder[] = "/dev/shm/cuda_adapter_bench_XXXXXX";
    if (mkdtemp(folder) == nullptr) std::exit(1);
    folder_ = folder;
  }
  ~Publisher() { std::filesystem::remove_all(folder_); }

  const std::string& folder() const { return folder_; }

  // Returns when the version is active; retires the one before.
  void Publish(const char* work) {
    adapter::PublishOptions options;
    options.name = "bench";
    options.activate = true;
    absl::Notification done;
    loader_.Publish(
        std::move(options), adapter::PathSource{folder_, /*trusted=*/true},
        [&](const absl::StatusOr<adapter::PublishResult>& result) {
          Must(result.status());
          const adapter::LoadTiming& timing = result->adapter.summary.timing;
          std::printf(
              "{\"work\": \"%s\", \"ms\": %.0f, \"read_ms\": %.0f, \"validate_ms\": %.0f, "
              "\"copy_ms\": %.1f, \"rest_ms\": %.1f}\n",
              work, Milliseconds(timing.total), Milliseconds(timing.read),
              Milliseconds(timing.validate), Milliseconds(timing.copy), Milliseconds(timing.norms));
          std::fflush(stdout);
          done.Notify();
        });
    done.WaitForNotification();
    if (++version_ > 1) Must(registry_.Retire("bench", version_ - 1).status());
  }

 private:
  ThreadPool pool_;
  adapter::Residency residency_;
  adapter::AdapterRegistry registry_;
  adapter::AdapterLoader loader_;
  std::string folder_;
  int64_t version_ = 0;
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    Must(OpenDevice().status());
    model_ = Must(CudaModel::Random(Must(bench::ReadModelShape("qwen3-8b", options_.at("layers"))),
                                    1, &ledger_));
    gaps_ = Must(BackgroundLaunchQueue::Create());
    Uploader::Options upload = Uploader::DefaultOptions();
    if (options_.at("threads") > 0) upload.threads = static_cast<int>(options_.at("threads"));
    upload.piece_bytes = options_.at("piece_kib") << 10;
    upload.window = static_cast<int>(options_.at("window"));
    builder_ = Must(MakeCudaAdapterBuilder(model_.get(), gaps_.get(), &ledger_, upload));
  }

  void Run() {
    const auto rank = static_cast<int>(options_.at("rank"));
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      if (dtype == DType::kF32 && options_.at("fp32") == 0) continue;
      Tensors tensors(*model_, rank, dtype);
      const DeviceBuffer device = Must(DeviceBuffer::Allocate(&ledger_, "bench", tensors.bytes()));
      tensors.Fill(device.as<>());
      Load("device", tensors.At(device.as<>(), TensorPlace::kDevice), dtype);
      {
        const SharedFile file(tensors.bytes());
        Must(ToStatus(
            cudaMemcpy(file.data(), device.as<>(), tensors.bytes(), cudaMemcpyDeviceToHost),
            "copying"));
        Load("file", tensors.At(file.data(), TensorPlace::kHost), dtype);
      }
      if (dtype == DType::kF32) continue;
      const PinnedBuffer pinned = Must(PinnedBuffer::Allocate(tensors.bytes()));
      Must(ToStatus(
          cudaMemcpy(pinned.as<>(), device.as<>(), tensors.bytes(), cudaMemcpyDeviceToHost),
          "copying"));
      Load("pinned", tensors.At(pinned.as<>(), TensorPlace::kPinned), dtype);
      TakeTurns(tensors.At(device.as<>(), TensorPlace::kDevice));
      if (options_.at("batch") > 0) Disturb(tensors, device.as<>(), pinned.as<>());
    }
  }

 private:
  BuiltAdapter Build(const AdapterTensors& tensors) { return Must(builder_->Build(tensors)); }

  void Load(const char* place, const AdapterTensors& tensors, DType dtype) {
    std::vector<double> total, copy, norms;
    double first = 0.0;
    for (int i = 0; i < options_.at("repeats"); ++i) {
      const absl::Time begin = absl::Now();
      const BuiltAdapter built = Build(tensors);
      total.push_back(Milliseconds(absl::Now() - begin));
      copy.push_back(Milliseconds(built.copy));
      norms.push_back(Milliseconds(built.norms));
      if (i == 0) first = total[0];
    }
    std::printf(
        "{\"work\": \"build\", \"from\": \"%s\", \"dtype\": \"%s\", \"ms\": %.1f, \"copy_ms\": "
        "%.1f, \"rest_ms\": %.1f, \"least_ms\": %.1f, \"first_ms\": %.1f}\n",
        place, NameOf(dtype), Quantile(total, 0.5), Quantile(copy, 0.5), Quantile(norms, 0.5),
        Quantile(total, 0.0), first);
    std::fflush(stdout);
  }

  // An adapter's way to host memory, as an image, and back.
  void TakeTurns(const AdapterTensors& tensors) {
    const BuiltAdapter built = Build(tensors);
    const absl::Time begin = absl::Now();
    MakeImages(built.bytes);
    const double pin = Milliseconds(absl::Now() - begin);
    std::vector<double> save, restore;
    for (int i = 0; i < options_.at("repeats"); ++i) {
      const absl::Time start = absl::Now();
      const auto image = Must(images_->Save(built.weights));
      const absl::Time saved = absl::Now();
      Must(images_->Restore(*image).status());
      restore.push_back(Milliseconds(absl::Now() - saved));
      save.push_back(Milliseconds(saved - start));
    }
    std::printf(
        "{\"work\": \"image\", \"bytes\": %lld, \"save_ms\": %.1f, \"restore_ms\": %.1f, "
        "\"pin_ms\": %.0f}\n",
        static_cast<long long>(built.bytes), Quantile(save, 0.5), Quantile(restore, 0.5), pin);
    std::fflush(stdout);
  }

  void MakeImages(int64_t bytes) {
    images_ = Must(MakeCudaHostCopies(model_.get(), bytes + PinnedPages::kPageBytes, &ledger_));
  }

  // Steps of a decoding batch, alone and while adapters are loaded one after the other.
  void Disturb(Tensors& tensors, const void* device, const void* pinned) {
    const int64_t batch = options_.at("batch");
    const int64_t context = options_.at("context");
    const int64_t pages =
        batch * (bench::PagesOf(model_->config(), context + engine::kKvPageTokens) +
                 StateLayoutOf(model_->config()).pages());
    const auto runner = Must(MakeCudaModelRunner(
        model_.get(), {pages, context + 16, batch, batch, gaps_.get()}, &ledger_));
    const adapter::LoadedAdapter loaded("bench", 1, adapter::AdapterSummary(),
                                        Build(tensors.At(pinned, TensorPlace::kPinned)).weights);
    bench::DecodeStep step(batch, context, *runner, &loaded);
    const auto run = [&](const char* during, const std::function<void()>& load,
                         size_t least_steps = 200) {
      std::vector<double> times, loads;
      std::vector<absl::Time> steps, begins;
      std::atomic<bool> done{false};
      Must(runner->Begin(step.sequences(/*behind=*/false)));
      const auto next = [&] {
        Must(runner->Begin(step.sequences(/*behind=*/true)));
        Must(runner->Finish().status());
      };
      for (int i = 0; i < 20; ++i) next();
      std::thread loader([&] {
        for (int i = 0; load != nullptr && i < 3; ++i) {
          begins.push_back(absl::Now());
          load();
          loads.push_back(Milliseconds(absl::Now() - begins.back()));
        }
        done = true;
      });
      while (!done || times.size() < least_steps) {
        steps.push_back(absl::Now());
        next();
        times.push_back(Milliseconds(absl::Now() - steps.back()));
      }
      Must(runner->Finish().status());
      loader.join();
      // When the longest step began: milliseconds after the load that ran.
      const absl::Time longest =
          steps[std::max_element(times.begin(), times.end()) - times.begin()];
      double at = 0.0;
      for (const absl::Time begin : begins) {
        if (begin <= longest) at = Milliseconds(longest - begin);
      }
      if (loads.empty()) loads.push_back(0.0);
      std::printf(
          "{\"work\": \"steps\", \"batch\": %lld, \"during\": \"%s\", \"steps\": %zu, \"p50_ms\": "
          "%.2f, \"p99_ms\": %.2f, \"max_ms\": %.2f, \"max_at_ms\": %.0f, \"load_ms\": %.1f}\n",
          static_cast<long long>(batch), during, times.size(), Quantile(times, 0.5),
          Quantile(times, 0.99), Quantile(times, 1.0), at, Quantile(loads, 0.5));
      std::fflush(stdout);
    };
    run("nothing", nullptr);
    for (const auto& [during, at, place] :
         {std::tuple("build from pinned", pinned, TensorPlace::kPinned),
          // The same bytes, which the builder is not told are page-locked.
          std::tuple("build from host", pinned, TensorPlace::kHost),
          std::tuple("build from device", device, TensorPlace::kDevice)}) {
      const AdapterTensors from = tensors.At(at, place);
      run(during, [&] { Build(from); });
    }
    const BuiltAdapter other = Build(tensors.At(device, TensorPlace::kDevice));
    const auto turn = [&] { Must(images_->Restore(*Must(images_->Save(other.weights))).status()); };
    run("turns through host memory, which need more of the device's", turn);
    run("turns through host memory", turn);
    Publisher publisher(model_.get(), builder_.get());
    tensors.WriteFolder(*model_, publisher.folder(), pinned);
    publisher.Publish("publish");
    run("publish", [&] { publisher.Publish("publish beside steps"); });
    // As many as there are beside the publishing.
    run("nothing", nullptr, 1500);
  }

  const Options options_;
  MemoryLedger ledger_;
  std::unique_ptr<CudaModel> model_;
  std::unique_ptr<BackgroundLaunchQueue> gaps_;
  std::unique_ptr<adapter::AdapterBuilder> builder_;
  std::unique_ptr<adapter::HostCopies> images_;
};

}  // namespace
}  // namespace dorad::cuda

int main(int argc, char** argv) {
  dorad::cuda::Options options = {{"rank", 384},    {"layers", 36}, {"batch", 32},
                                  {"context", 656}, {"threads", 0}, {"piece_kib", 2048},
                                  {"window", 16},   {"repeats", 7}, {"fp32", 1}};
  for (int i = 1; i + 1 < argc; i += 2) {
    const auto option = options.find(std::string(argv[i]).substr(2));
    if (option == options.end()) {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 1;
    }
    option->second = std::atoll(argv[i + 1]);
  }
  dorad::cuda::Bench(options).Run();
  return 0;
}
