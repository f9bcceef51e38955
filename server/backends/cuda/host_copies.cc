#include "server/backends/cuda/host_copies.h"

#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/backends/cuda/adapter.h"
#include "server/backends/cuda/page_copier.h"
#include "server/backends/cuda/pinned_pages.h"
#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

using adapter::AdapterWeights;
using adapter::HostCopy;
using kernels::DoraFactors;

constexpr char kSaving[] = "saving an adapter's weights";
constexpr char kRestoring[] = "restoring an adapter's weights";
class CudaHostCopy final : public HostCopy {
 public:
  CudaHostCopy(PinnedPages* arena, PinnedPages::Pages pages, const CudaAdapterWeights& weights)
      : arena_(*arena),
        pages_(std::move(pages)),
        bytes_(weights.bytes()),
        image_at_(static_cast<const std::byte*>(weights.image()) - weights.memory()),
        memory_was_at_(weights.memory()),
        modules_(weights.modules()) {}
  ~CudaHostCopy() override { arena_.Return(pages_); }

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

class CudaHostCopies final : public adapter::HostCopies {
 public:
  CudaHostCopies(const CudaModel* model, MemoryLedger* ledger, std::unique_ptr<PinnedPages> pages,
                 PageCopier out, PageCopier in)
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

  absl::StatusOr<std::unique_ptr<const HostCopy>> Save(
      const std::shared_ptr<const AdapterWeights>& weights) override {
    const auto& ours = static_cast<const CudaAdapterWeights&>(*weights);
    DORAD_ASSIGN_OR_RETURN(PinnedPages::Pages taken,
                           pages_->Take(PinnedPages::PagesFor(ours.bytes())));
    auto copy = std::make_unique<const CudaHostCopy>(pages_.get(), std::move(taken), ours);
    absl::MutexLock lock(&out_mu_);
    DORAD_RETURN_IF_ERROR(out_.FromDevice(copy->pages(), ours.memory(), copy->bytes(), kSaving));
    return copy;
  }

  absl::StatusOr<std::shared_ptr<const AdapterWeights>> Restore(const HostCopy& copy) override {
    const auto& ours = static_cast<const CudaHostCopy&>(copy);
    DORAD_ASSIGN_OR_RETURN(DeviceBuffer memory,
                           DeviceBuffer::Allocate(&ledger_, "adapters", ours.bytes()));
    auto* const device = memory.as<std::byte>();
    absl::MutexLock lock(&in_mu_);
    DORAD_RETURN_IF_ERROR(in_.ToDevice(ours.pages(), device, ours.bytes(), kRestoring));
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

absl::StatusOr<std::unique_ptr<adapter::HostCopies>> MakeCudaHostCopies(const CudaModel* model,
                                                                        int64_t capacity_bytes,
                                                                        MemoryLedger* ledger) {
  DORAD_ASSIGN_OR_RETURN(std::unique_ptr<PinnedPages> pages, PinnedPages::Create(capacity_bytes));
  DORAD_ASSIGN_OR_RETURN(PageCopier out, PageCopier::Create());
  DORAD_ASSIGN_OR_RETURN(PageCopier in, PageCopier::Create());
  return std::make_unique<CudaHostCopies>(model, ledger, std::move(pages), std::move(out),
                                          std::move(in));
}

}  // namespace dorad::cuda
