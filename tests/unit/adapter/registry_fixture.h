// A registry whose weights are counted, with an executor that runs on demand.
#pragma once

#include "server/adapter/registry/registry.h"
#include "server/adapter/registry/version.h"
#include "server/platform/thread_pool.h"
#include "tests/unit/support/test.h"

namespace dorad::adapter {

// Counts weights that are alive and notes frees by any thread other than the executor's.
struct Memory {
  std::atomic<int> alive{0};
  std::atomic<int> freed_elsewhere{0};
  std::atomic<std::thread::id> executor{};
};

inline std::shared_ptr<const AdapterWeights> MakeWeights(Memory& memory) {
  ++memory.alive;
  return {new AdapterWeights, [&memory](const AdapterWeights* weights) {
            if (std::this_thread::get_id() != memory.executor.load()) ++memory.freed_elsewhere;
            --memory.alive;
            delete weights;
          }};
}

class AdapterRegistryTest : public ::testing::Test {
 protected:
  // Of the versions that are not GONE.
  int64_t Bytes() const {
    int64_t bytes = 0;
    for (const AdapterRecord& record : registry_->List("", "", 0, 1000)) {
      bytes += record.summary.resident_bytes;
    }
    return bytes;
  }

  AdapterRegistryTest() {
    pool_.Submit([this] { memory_.executor = std::this_thread::get_id(); });
    AdapterRegistry::Options options;
    options.max_events = 8;
    options.max_ended_records = 4;
    options.executor = [this](std::function<void()> task) { pool_.Submit(std::move(task)); };
    registry_ = std::make_unique<AdapterRegistry>(std::move(options));
    Drain();
  }

  // Waits until the executor has run what it was given.
  void Drain() {
    absl::Notification done;
    pool_.Submit([&done] { done.Notify(); });
    done.WaitForNotification();
  }

  std::shared_ptr<const LoadedAdapter> Loaded(const std::string& name, int64_t version,
                                              int64_t bytes = 100) {
    AdapterSummary summary;
    summary.digest = name;
    summary.resident_bytes = bytes;
    return std::make_shared<const LoadedAdapter>(name, version, summary, MakeWeights(memory_));
  }

  int64_t Publish(const std::string& name, bool activate) {
    const int64_t version = *registry_->Reserve(name, std::nullopt, {});
    EXPECT_TRUE(registry_->Publish(Loaded(name, version), activate, std::nullopt).ok());
    return version;
  }

  std::vector<EventType> EventTypes(int64_t after) {
    std::vector<EventType> types;
    const auto events = registry_->EventsAfter(after, 100);
    EXPECT_TRUE(events.ok()) << events.status();
    if (!events.ok()) return types;
    for (const RegistryEvent& event : *events) types.push_back(event.type);
    return types;
  }

  Memory memory_;
  ThreadPool pool_{1, 0};
  std::unique_ptr<AdapterRegistry> registry_;
};

}  // namespace dorad::adapter
