// Loads that wait, end and are refused; folders that may be read.
#include "tests/unit/cpu/loader_fixture.h"

namespace dorad::adapter {
namespace {

TEST_F(AdapterLoaderTest, EndsQueuedLoadsWithCancelledAndWaitsForTheRunningOne) {
  options_.max_queued_loads = 2;
  Start();
  absl::Notification entered, leave;
  base_.on_weight = [&] {
    if (!entered.HasBeenNotified()) entered.Notify();
    leave.WaitForNotification();
  };
  const std::string config = MakeConfig(true, {"q_proj"}).dump();
  const SharedBytes image =
      Share(test::WriteSafetensors(MakeTensors(modules_, {"q_proj"}, 2, true)));
  std::vector<absl::Status> results(4, absl::UnknownError("not called"));
  const auto submit = [&](int i) {
    loader_->Publish({.name = "a"}, BytesSource{config, image, absl::ZeroDuration()},
                     [&results, i](const auto& result) { results[i] = result.status(); });
  };
  submit(0);
  entered.WaitForNotification();
  submit(1);
  submit(2);
  submit(3);
  EXPECT_EQ(ReasonOf(results[3]), "LOAD_QUEUE_FULL");
  EXPECT_TRUE(RetryAfterOf(results[3]).has_value());
  std::thread ender([this] { loader_.reset(); });
  while (registry_->Get({"a", 3})->state != AdapterState::kFailed) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  leave.Notify();
  ender.join();
  EXPECT_TRUE(results[0].ok()) << results[0];
  EXPECT_EQ(results[1].code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(results[2].code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(registry_->Get({"a", 1})->state, AdapterState::kReady);
}

TEST_F(AdapterLoaderTest, QueuedLoadsWaitWhileTheLoaderIsSuspendedAndNewOnesAreRefused) {
  absl::Notification entered, leave;
  base_.on_weight = [&] {
    if (!entered.HasBeenNotified()) entered.Notify();
    leave.WaitForNotification();
  };
  const std::string config = MakeConfig(true, {"q_proj"}).dump();
  const SharedBytes image =
      Share(test::WriteSafetensors(MakeTensors(modules_, {"q_proj"}, 2, true)));
  std::vector<absl::Status> results(3, absl::UnknownError("not called"));
  std::vector<absl::Notification> done(3);
  const auto submit = [&](int i) {
    loader_->Publish({.name = "a"}, BytesSource{config, image, absl::ZeroDuration()},
                     [&, i](const auto& result) {
                       results[i] = result.status();
                       done[i].Notify();
                     });
  };
  submit(0);
  entered.WaitForNotification();
  submit(1);
  absl::Notification begun, held;
  std::thread holder([&] {
    begun.Notify();
    loader_->Suspend();
    held.Notify();
  });
  begun.WaitForNotification();
  absl::SleepFor(absl::Milliseconds(50));  // by now it waits, on all but the busiest machines
  EXPECT_FALSE(held.HasBeenNotified()) << "a load is under way";
  leave.Notify();
  holder.join();
  EXPECT_TRUE(done[0].HasBeenNotified());
  submit(2);
  absl::Notification idle;  // the pool has nothing left to do
  pool_.Submit([&] { idle.Notify(); });
  idle.WaitForNotification();
  EXPECT_FALSE(done[1].HasBeenNotified());
  EXPECT_EQ(registry_->Get({"a", 2})->state, AdapterState::kLoading);
  ASSERT_TRUE(done[2].HasBeenNotified());
  EXPECT_EQ(ReasonOf(results[2]), "SERVER_SLEEPING");
  EXPECT_TRUE(RetryAfterOf(results[2]).has_value());
  EXPECT_FALSE(registry_->Get({"a", 3}).ok()) << "no number is taken";
  {
    absl::MutexLock lock(&mu_);
    EXPECT_EQ(observed_bad_, 0) << "it is no load that failed";
  }
  loader_->Resume();
  for (int i = 0; i < 2; ++i) {
    done[i].WaitForNotification();
    EXPECT_TRUE(results[i].ok()) << results[i];
  }
}

TEST_F(AdapterLoaderTest, LoadsThatAreQueuedAtTheEndAreCancelled) {
  absl::Notification entered, leave;
  pool_.Submit([&] {
    entered.Notify();
    leave.WaitForNotification();
  });
  entered.WaitForNotification();
  absl::Status result;
  loader_->Publish(
      {.name = "a"},
      BytesSource{MakeConfig(true, {"q_proj"}).dump(),
                  Share(test::WriteSafetensors(MakeTensors(modules_, {"q_proj"}, 2, true))),
                  absl::ZeroDuration()},
      [&](const auto& published) { result = published.status(); });
  loader_->Suspend();
  leave.Notify();
  absl::Notification left;  // the task above refers to what this test holds
  pool_.Submit([&] { left.Notify(); });
  left.WaitForNotification();
  loader_.reset();
  EXPECT_EQ(ReasonOf(result), "LOAD_CANCELLED");
}

TEST_F(AdapterLoaderTest, LoadsAFolderBeneathAnAllowedRoot) {
  const auto result = PublishPath(WriteAdapter(folder_ / "root" / "x" / "y"));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->adapter.summary.num_modules, 3);
}

TEST_F(AdapterLoaderTest, FollowsLinksThatStayBeneathTheRoot) {
  WriteAdapter(folder_ / "root" / "blobs");
  std::filesystem::create_directories(folder_ / "root" / "snapshot");
  for (const char* file : {"adapter_config.json", "adapter_model.safetensors"}) {
    std::filesystem::create_symlink(std::filesystem::path("../blobs") / file,
                                    folder_ / "root" / "snapshot" / file);
  }
  EXPECT_TRUE(PublishPath(folder_ / "root" / "snapshot").ok());
}

TEST_F(AdapterLoaderTest, RefusesPathsThatLeaveTheRoots) {
  const std::filesystem::path outside = WriteAdapter(folder_ / "outside");
  const std::filesystem::path root = folder_ / "root";
  std::filesystem::create_symlink(outside, root / "link");
  std::filesystem::create_directories(root / "files");
  std::filesystem::create_symlink(outside / "adapter_config.json",
                                  root / "files" / "adapter_config.json");
  std::filesystem::create_directories(folder_ / "root2");
  WriteAdapter(folder_ / "root2");
  for (const std::filesystem::path& path :
       {outside, root / ".." / "outside", root / "link", root / "files", folder_ / "root2",
        folder_ / "no such thing", std::filesystem::path("/"), std::filesystem::path("")}) {
    const auto refused = PublishPath(path);
    EXPECT_EQ(ReasonOf(refused.status()), "PATH_NOT_ALLOWED") << path;
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kPermissionDenied);
  }
  EXPECT_TRUE(PublishPath(outside, /*trusted=*/true).ok());
}

TEST_F(AdapterLoaderTest, LinksTellNothingOfFilesOutsideTheRoots) {
  const std::filesystem::path outside = WriteAdapter(folder_ / "outside");
  const std::filesystem::path root = folder_ / "root";
  std::filesystem::create_symlink(folder_ / "outside", root / "link");
  std::filesystem::create_symlink(folder_ / "missing", root / "dangling");
  std::filesystem::create_directories(folder_ / "outside" / "there");
  for (const char* name : {"link", "link/there", "link/missing", "dangling", "dangling/x"}) {
    const absl::Status status = PublishPath(root / name).status();
    EXPECT_EQ(ReasonOf(status), "PATH_NOT_ALLOWED") << name;
  }
  EXPECT_EQ(ReasonOf(PublishPath(root / "missing" / "x").status()), "ADAPTER_FOLDER_NOT_FOUND");
}

TEST_F(AdapterLoaderTest, SaysWhatAFolderLacks) {
  const std::filesystem::path folder = folder_ / "root" / "x";
  EXPECT_EQ(ReasonOf(PublishPath(folder).status()), "ADAPTER_FOLDER_NOT_FOUND");
  std::filesystem::create_directories(folder);
  absl::Status status = PublishPath(folder).status();
  EXPECT_EQ(ReasonOf(status), "ADAPTER_FILE_MISSING");
  EXPECT_THAT(status.message(), HasSubstr("adapter_config.json"));
  WriteFile(folder / "adapter_config.json", "{}");
  status = PublishPath(folder).status();
  EXPECT_EQ(ReasonOf(status), "ADAPTER_FILE_MISSING");
  EXPECT_THAT(status.message(), HasSubstr("adapter_model.safetensors"));
  WriteFile(folder / "adapter_model.bin", "pickle");
  EXPECT_EQ(ReasonOf(PublishPath(folder).status()), "ADAPTER_FORMAT_UNSUPPORTED");
  ASSERT_EQ(mkfifo((folder / "adapter_model.safetensors").c_str(), 0600), 0);
  EXPECT_EQ(ReasonOf(PublishPath(folder).status()), "FILE_UNREADABLE");
}

TEST_F(AdapterLoaderTest, RefusesWhatIsTooLarge) {
  const std::filesystem::path folder = WriteAdapter(folder_ / "root" / "x");
  options_.read.max_adapter_bytes = 100;
  Start();
  EXPECT_EQ(ReasonOf(PublishPath(folder).status()), "ADAPTER_TOO_LARGE");
  EXPECT_EQ(
      ReasonOf(Publish(MakeConfig(true, {"q_proj"}), MakeTensors(modules_, {"q_proj"}, 2, true))
                   .status()),
      "ADAPTER_TOO_LARGE");
  WriteFile(folder / "adapter_config.json", std::string((1 << 20) + 1, ' '));
  EXPECT_EQ(ReasonOf(PublishPath(folder).status()), "ADAPTER_CONFIG_TOO_LARGE");
}

}  // namespace
}  // namespace dorad::adapter
