// The registry over a real store whose journal is rewritten meanwhile.

#include "server/adapter/registry/registry.h"
#include "server/adapter/store/store.h"
#include "server/platform/thread_pool.h"
#include "tests/unit/support/fake_disk.h"

namespace dorad::adapter {
namespace {

std::shared_ptr<const LoadedAdapter> Loaded(const std::string& name, int64_t version) {
  return std::make_shared<const LoadedAdapter>(name, version, AdapterSummary(),
                                               std::make_shared<AdapterWeights>());
}

// Calls back in the middle of a rewrite, on the thread that makes it.
class WatchedDisk : public Disk {
 public:
  int Rename(const std::string& from, const std::string& to) override {
    if (absl::EndsWith(to, "/journal")) on_rewrite();
    return Disk::Rename(from, to);
  }
  std::function<void()> on_rewrite;
};

TEST(CompactionTest, ReadersAreNotHeldUpAndSeeNothingOfAChangeThatIsNotOver) {
  test::ScratchFolder scratch;
  WatchedDisk disk;
  auto store = *Store::Open(scratch.path() / "store", "base", &disk);
  ThreadPool pool(1, 0);
  AdapterRegistry::Options options;
  options.executor = [&pool](std::function<void()> task) { pool.Submit(std::move(task)); };
  options.log = store.get();
  AdapterRegistry registry(std::move(options));
  int64_t active = 0, before = 0;
  int rewrites = 0;
  // Who waited for the change here would wait for ever.
  disk.on_rewrite = [&] {
    ++rewrites;
    EXPECT_EQ(registry.generation(), before);
    EXPECT_EQ(registry.EventsAfter(before, 10)->size(), 0u);
    EXPECT_EQ(registry.Get({"a", 0})->version, active);
    EXPECT_FALSE(registry.List("a", "", 0, 10).empty());
    const auto lease = registry.Acquire({"a", 0});
    ASSERT_TRUE(lease.ok()) << lease.status();
    EXPECT_EQ(lease->get()->version(), active);
    EXPECT_GT(store->stats().journal_bytes, 0);
  };
  for (int version = 1; version < 20; ++version) {
    before = registry.generation();
    ASSERT_EQ(*registry.Reserve("a", std::nullopt, {{"k", std::string(10000, 'v')}}), version);
    const std::string object = *store->Put("{}", {});
    ASSERT_TRUE(registry.Publish(Loaded("a", version), true, std::nullopt, object).ok());
    before = registry.generation();
    active = version;
    if (version > 1) {
      ASSERT_TRUE(registry.Retire("a", version - 1).ok());
    }
  }
  EXPECT_GE(rewrites, 2);
}

}  // namespace
}  // namespace dorad::adapter
