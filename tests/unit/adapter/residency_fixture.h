// A Residency whose loader tasks and clock the test drives, with weights that count themselves.
#pragma once

#include "server/adapter/registry/version.h"
#include "server/adapter/residency/host_copies.h"
#include "server/adapter/residency/residency.h"
#include "tests/unit/support/test.h"

namespace dorad::adapter {

// Weights that count themselves.
struct CountedWeights final : AdapterWeights {
  CountedWeights(int number, int* alive) : number(number), alive(alive) { ++*alive; }
  ~CountedWeights() override { --*alive; }
  const int number;
  int* const alive;
};

// Host memory that notices when more is saved than it holds. FakeHostCopies take whole pages of ten
// bytes.
class FakeHostCopies final : public HostCopies {
 public:
  FakeHostCopies(int64_t capacity, int* alive) : capacity_(capacity), alive_(alive) {}
  ~FakeHostCopies() override { EXPECT_EQ(bytes_, 0); }

  int64_t capacity_bytes() const override { return capacity_; }
  int64_t BytesFor(int64_t bytes) const override { return (bytes + 9) / 10 * 10; }
  absl::StatusOr<std::unique_ptr<const HostCopy>> Save(
      const std::shared_ptr<const AdapterWeights>& weights) override {
    if (failing_) return absl::InternalError("the device failed");
    if (throwing_) throw std::runtime_error("the device failed");
    ++saved_;
    const int number = static_cast<const CountedWeights&>(*weights).number;
    return std::make_unique<Copy>(this, number, BytesFor(sizes_[number]));
  }
  absl::StatusOr<std::shared_ptr<const AdapterWeights>> Restore(const HostCopy& copy) override {
    if (shortage_ > 0) {
      --shortage_;
      return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY", "no memory");
    }
    if (failing_) return absl::InternalError("the device failed");
    if (throwing_) throw std::runtime_error("the device failed");
    return std::make_shared<CountedWeights>(static_cast<const Copy&>(copy).number, alive_);
  }

  void SetSize(int number, int64_t bytes) { sizes_[number] = bytes; }
  void set_failing(bool failing) { failing_ = failing; }
  void set_throwing(bool throwing) { throwing_ = throwing; }
  // So many restores find no memory.
  void set_shortage(int restores) { shortage_ = restores; }
  int saved() const { return saved_; }
  int64_t bytes() const { return bytes_; }

 private:
  struct Copy final : HostCopy {
    Copy(FakeHostCopies* owner, int number, int64_t bytes)
        : owner(owner), number(number), bytes(bytes) {
      owner->bytes_ += bytes;
      EXPECT_LE(owner->bytes_, owner->capacity_) << "nobody made room";
    }
    ~Copy() override { owner->bytes_ -= bytes; }
    FakeHostCopies* const owner;
    const int number;
    const int64_t bytes;
  };

  const int64_t capacity_;
  int* const alive_;
  std::map<int, int64_t> sizes_;
  int64_t bytes_ = 0;
  int saved_ = 0;
  int shortage_ = 0;
  bool failing_ = false;
  bool throwing_ = false;
};

enum class Kind { kStored, kEphemeral, kPinned };

class ResidencyTest : public ::testing::Test {
 protected:
  using EntryPtr = std::unique_ptr<Residency::Entry>;

  ~ResidencyTest() override {
    RunTasks();
    EXPECT_EQ(alive_, 0);
  }

  void Start(int64_t max_bytes, int64_t host_bytes = 0) {
    residency_.reset();
    host_copies_.reset();
    if (host_bytes > 0) host_copies_ = std::make_unique<FakeHostCopies>(host_bytes, &alive_);
    Residency::Options options;
    options.max_bytes = max_bytes;
    options.host_copies = host_copies_.get();
    options.patience = absl::Seconds(2);
    options.shrink_kv = shrink_kv_;
    options.executor = [this](std::function<void()> task) {
      absl::MutexLock lock(&tasks_mu_);
      tasks_.push_back(std::move(task));
    };
    options.now = [this] {
      absl::MutexLock lock(&now_mu_);
      return now_;
    };
    residency_ = std::make_unique<Residency>(std::move(options));
  }

  absl::StatusOr<EntryPtr> Add(int number, int64_t bytes, Kind kind = Kind::kStored) {
    if (host_copies_) host_copies_->SetSize(number, bytes);
    Residency::Reload reload;
    if (kind != Kind::kEphemeral) {
      reload = [this, number]() -> absl::StatusOr<std::shared_ptr<const AdapterWeights>> {
        if (failing_) return absl::DataLossError("no longer there");
        if (throwing_) throw std::runtime_error("no longer there");
        return std::make_shared<CountedWeights>(number, &alive_);
      };
    }
    return residency_->Add(std::make_shared<CountedWeights>(number, &alive_), bytes,
                           std::move(reload), kind == Kind::kPinned);
  }

  void RunTasks() {
    while (true) {
      std::function<void()> task;
      {
        absl::MutexLock lock(&tasks_mu_);
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  // Of a residency that waits for what is reloaded.
  absl::Status Wake() {
    std::atomic<bool> done = false;
    absl::Status status;
    std::thread waking([&] {
      status = residency_->Wake();
      done = true;
    });
    while (!done) RunTasks();
    waking.join();
    return status;
  }

  static absl::StatusOr<std::optional<Residency::Pins>> Use(Residency::Entry& entry) {
    Residency::Entry* const all[] = {&entry};
    return Residency::PinAll(all);
  }
  static WeightsPin TakeUse(Residency::Entry& entry) { return std::move((**Use(entry))[0]); }

  // "away", the reason of a failure, or "" with a use that is given back at once.
  static std::string Try(Residency::Entry& entry) {
    const auto use = Use(entry);
    if (!use.ok()) return ReasonOf(use.status());
    return use->has_value() ? "" : "away";
  }
  static int NumberOf(const Residency::Entry& entry) {
    return static_cast<const CountedWeights&>(entry.weights()).number;
  }

  // Whether something that needs memory, and nothing else, gets room.
  bool MakesRoom() {
    int attempts = 0;
    (void)residency_->WithRoom([&] {
      return ++attempts > 1 ? absl::OkStatus()
                            : MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY", "");
    });
    return attempts > 1;
  }

  int alive_ = 0;
  bool failing_ = false;   // loads from the store
  bool throwing_ = false;  // the same, with an exception
  absl::Mutex now_mu_;
  absl::Time now_ = absl::UnixEpoch();
  absl::Mutex tasks_mu_;
  std::deque<std::function<void()>> tasks_;
  std::function<int64_t(int64_t)> shrink_kv_;  // of the next Start
  std::unique_ptr<FakeHostCopies> host_copies_;
  std::unique_ptr<Residency> residency_;
};

}  // namespace dorad::adapter
