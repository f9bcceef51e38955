#include "server/cuda/adapter_images.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/base/error.h"
#include "server/cuda/adapter.h"
#include "server/cuda/pinned_pages.h"

namespace dorad::cuda {
namespace {

using adapter::AdapterWeights;
using adapter::WeightsImage;
using kernels::DoraFactors;

constexpr char kSaving[] = "saving an adapter's weights";
constexpr char kRestoring[] = "restoring an adapter's weights";
// Pages that a copy engine has at a time. It serves its queue in order, and what a decode step
// copies must not wait long: 40 us a page.
constexpr int kPagesUnderWay = 8;

// Copies pages to or from the device, one after the other.
class PageCopier {
 public:
  static absl::StatusOr<PageCopier> Create() {
    DORAD_ASSIGN_OR_RETURN(Stream stream, Stream::Create(Priority::kLoading));
    PageCopier copier(std::move(stream));
    for (int i = 0; i < kPagesUnderWay; ++i) {
      DORAD_ASSIGN_OR_RETURN(Event event, Event::Create(Event::Wait::kSleeping));
      copier.under_way_.push_back(std::move(event));
    }
    return copier;
  }

  const Stream& stream() const { return stream_; }

  // The first `bytes` of the pages. Done on return, also after a failure.
  absl::Status Copy(const PinnedPages::Pages& pages, std::byte* device, int64_t bytes,
                    cudaMemcpyKind kind, std::string_view what) {
    const absl::Status enqueued = Enqueue(pages, device, bytes, kind, what);
    absl::Status done = stream_.Synchronize(what);
    return enqueued.ok() ? done : enqueued;
  }

 private:
  explicit PageCopier(Stream stream) : stream_(std::move(stream)) {}

  absl::Status Enqueue(const PinnedPages::Pages& pages, std::byte* device, int64_t bytes,
                       cudaMemcpyKind kind, std::string_view what) {
    constexpr int64_t kBytes = PinnedPages::kPageBytes;
    for (size_t i = 0; i < pages.size(); ++i) {
      const Event& earlier = under_way_[i % under_way_.size()];
      DORAD_RETURN_IF_ERROR(earlier.Synchronize(what));
      std::byte* const there = device + static_cast<int64_t>(i) * kBytes;
      const bool to_device = kind == cudaMemcpyHostToDevice;
      DORAD_RETURN_IF_CUDA_ERROR(
          cudaMemcpyAsync(to_device ? there : pages[i], to_device ? pages[i] : there,
                          std::min(kBytes, bytes - static_cast<int64_t>(i) * kBytes), kind,
                          stream_.get()),
          what);
      DORAD_RETURN_IF_ERROR(earlier.Record(stream_, what));
    }
    return absl::OkStatus();
  }

  Stream stream_;
  std::vector<Event> under_way_;
};

class CudaWeightsImage final : public WeightsImage {
 public:
  CudaWeightsImage(PinnedPages* arena, PinnedPages::Pages pages, const CudaAdapterWeights& weights)
      : arena_(*arena),
        pages_(std::move(pages)),
        bytes_(weights.bytes()),
        image_at_(static_cast<const std::byte*>(weights.image()) - weights.memory()),
        memory_was_at_(weights.memory()),
        modules_(weights.modules()) {}
  ~CudaWeightsImage() override { arena_.Return(pages_); }

  const PinnedPages::Pages& pages() const { return pages_; }
  int64_t bytes() const { return bytes_; }
  int64_t image_at() const { return image_at_; }
  // The factors of weights whose memory is at `memory`.
  std::vector<DoraFactors> ModulesAt(const std::byte* memory) const {
    std::vector<DoraFactors> modules = modules_;
    for (DoraFactors& module : modules) {
      Move(module.a, memory);
      Move(module.b, memory);
      Move(module.g, memory);
    }
    return modules;
  }

 private:
  template <typename T>
  void Move(const T*& pointer, const std::byte* memory) const {
    if (pointer == nullptr) return;
    const auto offset = reinterpret_cast<const std::byte*>(pointer) - memory_was_at_;
    pointer = reinterpret_cast<const T*>(memory + offset);
  }

  PinnedPages& arena_;
  const PinnedPages::Pages pages_;
  const int64_t bytes_;
  const int64_t image_at_;
  const std::byte* const memory_was_at_;
  const std::vector<DoraFactors> modules_;  // as they were there
};

class CudaWeightsImages final : public adapter::WeightsImages {
 public:
  CudaWeightsImages(const CudaModel* model, MemoryLedger* ledger,
                    std::unique_ptr<PinnedPages> pages, PageCopier out, PageCopier in)
      : model_(*model),
        ledger_(*ledger),
        pages_(std::move(pages)),
        out_(std::move(out)),
        in_(std::move(in)) {}

  int64_t capacity_bytes() const override {
    return pages_->total_pages() * PinnedPages::kPageBytes;
  }
  int64_t BytesFor(int64_t weights_bytes) const override {
    return PinnedPages::PagesFor(weights_bytes) * PinnedPages::kPageBytes;
  }

  absl::StatusOr<std::unique_ptr<const WeightsImage>> Save(
      const std::shared_ptr<const AdapterWeights>& weights) override {
    const auto& ours = static_cast<const CudaAdapterWeights&>(*weights);
    DORAD_ASSIGN_OR_RETURN(PinnedPages::Pages taken,
                           pages_->Take(PinnedPages::PagesFor(ours.bytes())));
    auto image = std::make_unique<const CudaWeightsImage>(pages_.get(), std::move(taken), ours);
    absl::MutexLock lock(&out_mu_);
    // cudaMemcpyAsync takes both ends without const.
    DORAD_RETURN_IF_ERROR(out_.Copy(image->pages(), const_cast<std::byte*>(ours.memory()),
                                    image->bytes(), cudaMemcpyDeviceToHost, kSaving));
    return image;
  }

  absl::StatusOr<std::shared_ptr<const AdapterWeights>> Restore(
      const WeightsImage& image) override {
    const auto& ours = static_cast<const CudaWeightsImage&>(image);
    DORAD_ASSIGN_OR_RETURN(DeviceBuffer memory,
                           DeviceBuffer::Allocate(&ledger_, "adapters", ours.bytes()));
    auto* const device = memory.as<std::byte>();
    absl::MutexLock lock(&in_mu_);
    DORAD_RETURN_IF_ERROR(
        in_.Copy(ours.pages(), device, ours.bytes(), cudaMemcpyHostToDevice, kRestoring));
    return FinishAdapter(model_, std::move(memory), ours.image_at(), ours.ModulesAt(device),
                         in_.stream());
  }

 private:
  const CudaModel& model_;
  MemoryLedger& ledger_;
  const std::unique_ptr<PinnedPages> pages_;
  absl::Mutex out_mu_, in_mu_;
  PageCopier out_ ABSL_GUARDED_BY(out_mu_);
  PageCopier in_ ABSL_GUARDED_BY(in_mu_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<adapter::WeightsImages>> MakeCudaWeightsImages(
    const CudaModel* model, int64_t capacity_bytes, MemoryLedger* ledger) {
  DORAD_ASSIGN_OR_RETURN(std::unique_ptr<PinnedPages> pages, PinnedPages::Create(capacity_bytes));
  DORAD_ASSIGN_OR_RETURN(PageCopier out, PageCopier::Create());
  DORAD_ASSIGN_OR_RETURN(PageCopier in, PageCopier::Create());
  return std::make_unique<CudaWeightsImages>(model, ledger, std::move(pages), std::move(out),
                                             std::move(in));
}

}  // namespace dorad::cuda
