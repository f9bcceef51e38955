// What residency costs the engine's thread in a step: it asks for the weights of some sequences,
// of which a part is away, and lets go of those that it got. Weights leave and come back between
// steps, outside of the time that is measured.
//
//   residency_bench [VERSIONS [SEQUENCES...]]       default 5000, 64 256
//
// One JSON line for each case: the mean and the largest time of a step on this thread's CPU, in
// microseconds.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "server/adapter/residency/adapter_weights.h"
#include "server/adapter/residency/host_copies.h"
#include "server/adapter/residency/residency.h"

namespace dorad::adapter {
namespace {

// Of this thread's CPU: other work on the host does not count.
double NowInMicroseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

struct NoWeights final : AdapterWeights {};
struct NoImage final : HostCopy {};

class Images final : public HostCopies {
 public:
  explicit Images(int64_t capacity) : capacity_(capacity) {}
  int64_t capacity_bytes() const override { return capacity_; }
  int64_t BytesFor(int64_t bytes) const override { return bytes; }
  absl::StatusOr<std::unique_ptr<const HostCopy>> Save(
      const std::shared_ptr<const AdapterWeights>&) override {
    return std::make_unique<NoImage>();
  }
  absl::StatusOr<std::shared_ptr<const AdapterWeights>> Restore(const HostCopy&) override {
    return std::make_shared<NoWeights>();
  }

 private:
  const int64_t capacity_;
};

// Half of the versions are resident. hosted: only host memory brings a part of them back.
void Report(int versions, int sequences, bool hosted) {
  Images images(versions / 2);
  std::deque<std::function<void()>> tasks;
  Residency::Options options;
  options.max_bytes = versions / 2;
  if (hosted) options.host_copies = &images;
  options.executor = [&](std::function<void()> task) { tasks.push_back(std::move(task)); };
  Residency residency(std::move(options));
  const auto run_tasks = [&] {
    while (!tasks.empty()) {
      const std::function<void()> task = std::move(tasks.front());
      tasks.pop_front();
      task();
    }
  };
  std::vector<std::unique_ptr<Residency::Entry>> entries;
  for (int i = 0; i < versions; ++i) {
    Residency::Reload reload = [] { return std::make_shared<NoWeights>(); };
    if (hosted && i % 4 == 0) reload = nullptr;
    auto entry = residency.Add(std::make_shared<NoWeights>(), 1, std::move(reload));
    if (!entry.ok()) std::exit(1);
    entries.push_back(*std::move(entry));
  }
  std::mt19937 random(1);
  double total = 0, largest = 0;
  constexpr int kSteps = 400;
  int64_t missed = 0;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<Residency::Entry*> chosen;
    int away = 0;
    while (static_cast<int>(chosen.size()) < sequences) {
      Residency::Entry* const entry = entries[random() % entries.size()].get();
      const bool is_away = !entry->resident();
      if (is_away && away == sequences / 2) continue;
      away += is_away;
      chosen.push_back(entry);
    }
    const double begin = NowInMicroseconds();
    std::vector<Residency::Pins> uses;
    for (Residency::Entry* entry : chosen) {
      auto got = Residency::PinAll({&entry, 1});
      if (got.ok() && got->has_value()) uses.push_back(**std::move(got));
    }
    missed += sequences - static_cast<int64_t>(uses.size());
    uses.clear();
    const double took = NowInMicroseconds() - begin;
    total += took;
    largest = std::max(largest, took);
    run_tasks();
  }
  std::printf(
      "{\"versions\": %d, \"sequences\": %d, \"hosted\": %s, \"away_share\": %.2f, "
      "\"step_us\": %.1f, \"largest_step_us\": %.1f}\n",
      versions, sequences, hosted ? "true" : "false",
      static_cast<double>(missed) / (static_cast<double>(kSteps) * sequences), total / kSteps,
      largest);
  std::fflush(stdout);
  entries.clear();
  run_tasks();
}

}  // namespace
}  // namespace dorad::adapter

int main(int argc, char** argv) {
  const int versions = argc > 1 ? std::atoi(argv[1]) : 5000;
  std::vector<int> sequences;
  for (int i = 2; i < argc; ++i) sequences.push_back(std::atoi(argv[i]));
  if (sequences.empty()) sequences = {64, 256};
  for (const bool hosted : {false, true}) {
    for (const int n : sequences) dorad::adapter::Report(versions, n, hosted);
  }
  return 0;
}
