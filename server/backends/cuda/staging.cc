#include "server/backends/cuda/staging.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <thread>
#include <utility>

#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/exception.h"

namespace dorad::cuda {
namespace {

constexpr char kCopy[] = "copying to the GPU";
// Eight threads keep up with a link of 55 GB/s.
constexpr int kMostThreads = 8;
constexpr int kNice = 10;  // as the loader's

}  // namespace

class Uploader::Batch {
 public:
  explicit Batch(int64_t pieces) : left_(pieces) {}

  void Done(const absl::Status& status) {
    absl::MutexLock lock(&mu_);
    --left_;
    status_.Update(status);
  }
  absl::Status Wait() const {
    absl::MutexLock lock(&mu_);
    const auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return left_ == 0; };
    mu_.Await(absl::Condition(&done));
    return status_;
  }

 private:
  mutable absl::Mutex mu_;
  int64_t left_ ABSL_GUARDED_BY(mu_);
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

Uploader::Options Uploader::DefaultOptions() {
  Options options;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  options.threads = std::clamp(cores / 2, 1, kMostThreads);
  return options;
}

Uploader::Uploader(const Options& options, Stream stream)
    : options_(options), stream_(std::move(stream)), pool_(options.threads, kNice) {}

absl::StatusOr<std::unique_ptr<Uploader>> Uploader::Create(const Options& options) {
  DORAD_CHECK(options.threads > 0 && options.piece_bytes > 0 && options.window > 0);
  DORAD_ASSIGN_OR_RETURN(Stream stream, Stream::Create(Priority::kLow));
  std::unique_ptr<Uploader> uploader(new Uploader(options, std::move(stream)));
  DORAD_RETURN_IF_ERROR(uploader->AllocateAll());
  return uploader;
}

absl::Status Uploader::AllocateAll() {
  absl::MutexLock lock(&mu_);
  // Two for each thread: one is filled while the other is on its way.
  for (int i = 0; i < 2 * options_.threads; ++i) {
    DORAD_ASSIGN_OR_RETURN(PinnedBuffer memory, PinnedBuffer::Allocate(options_.piece_bytes));
    DORAD_ASSIGN_OR_RETURN(Event copied, Event::Create(Event::Wait::kSleeping));
    free_.emplace_back(std::move(memory), std::move(copied));
  }
  absl::MutexLock send_lock(&send_mu_);
  for (int i = 0; i < options_.window; ++i) {
    DORAD_ASSIGN_OR_RETURN(Event event, Event::Create());
    window_.push_back(std::move(event));
  }
  return absl::OkStatus();
}

Uploader::~Uploader() = default;

std::shared_ptr<Uploader::Batch> Uploader::Start(absl::Span<const Copy> copies, bool pinned) {
  std::vector<Copy> pieces;
  for (const Copy& copy : copies) {
    for (int64_t first = 0; first < copy.bytes; first += options_.piece_bytes) {
      pieces.push_back({static_cast<const char*>(copy.from) + first,
                        static_cast<char*>(copy.to) + first,
                        std::min(options_.piece_bytes, copy.bytes - first)});
    }
  }
  auto batch = std::make_shared<Batch>(static_cast<int64_t>(pieces.size()));
  for (const Copy& piece : pieces) {
    try {
      pool_.Submit([this, piece, pinned, batch] { batch->Done(Bring(piece, pinned)); });
    } catch (...) {  // Wait returns only when earlier pieces have read their sources
      batch->Done(StatusOfException(kCopy, "INTERNAL_ERROR"));
    }
  }
  return batch;
}

absl::Status Uploader::Wait(const Batch& batch) { return batch.Wait(); }

absl::Status Uploader::Bring(const Copy& piece, bool pinned) {
  if (pinned) return Send(piece, nullptr);
  std::list<Buffer> taken;
  {
    absl::MutexLock lock(&mu_);
    taken.splice(taken.end(), free_, free_.begin());
  }
  const Buffer& buffer = taken.front();
  absl::Status status = buffer.copied.Synchronize(kCopy);
  if (status.ok()) {
    std::memcpy(buffer.memory.as<>(), piece.from, static_cast<size_t>(piece.bytes));
    status = Send({buffer.memory.as<>(), piece.to, piece.bytes}, &buffer.copied);
  }
  absl::MutexLock lock(&mu_);
  free_.splice(free_.end(), taken);
  return status;
}

absl::Status Uploader::Send(const Copy& piece, const Event* copied) {
  absl::MutexLock lock(&send_mu_);
  const Event& oldest = window_[sent_++ % window_.size()];
  DORAD_RETURN_IF_ERROR(oldest.Synchronize(kCopy));
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(piece.to, piece.from, piece.bytes, cudaMemcpyHostToDevice, stream_.get()),
      kCopy);
  if (copied != nullptr) DORAD_RETURN_IF_ERROR(copied->Record(stream_, kCopy));
  return oldest.Record(stream_, kCopy);
}

}  // namespace dorad::cuda
