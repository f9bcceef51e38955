#include "server/rpc/upload.h"

#include <sys/mman.h>

#include "tests/unit/support/publish_parts.h"
#include "tests/unit/support/test.h"

namespace dorad::rpc {
namespace {

constexpr int64_t kMaxBytes = 8 << 20;

v1::PublishRequest Begin(uint64_t size, const std::string& sha256 = "") {
  v1::PublishRequest part = rpc::Begin(size);
  part.mutable_begin()->set_safetensors_sha256(sha256);
  return part;
}

std::string Sha(const std::string& data) {
  Sha256 sha;
  sha.Update(data.data(), data.size());
  const auto digest = sha.Final();
  return std::string(digest.begin(), digest.end());
}

class UploadTest : public testing::Test {
 protected:
  std::string Feed(v1::PublishRequest part) { return ReasonOf(upload_->Accept(&part)); }

  // Announces `size` bytes and sends the first `come` of them (-1: all): the first refusal's
  // reason.
  static std::string Fill(Upload* upload, int64_t size, int64_t come = -1) {
    v1::PublishRequest part = Begin(size);
    absl::Status status = upload->Accept(&part);
    for (int64_t at = 0; status.ok() && at < (come < 0 ? size : come); at += kMaxChunkBytes) {
      part = Chunk(at, std::string(kMaxChunkBytes, 'x'));
      status = upload->Accept(&part);
    }
    return ReasonOf(status);
  }

  std::shared_ptr<UploadBudget> budget_ = std::make_shared<UploadBudget>(2 * kMaxBytes);
  std::unique_ptr<Upload> upload_ = std::make_unique<Upload>(kMaxBytes, false, budget_);
};

TEST_F(UploadTest, RefusesADurableVersionAtOnceWhenThereIsNoStore) {
  v1::PublishRequest begin = Begin(5);
  begin.mutable_begin()->set_durable(true);
  EXPECT_EQ(Feed(begin), "STORE_NOT_CONFIGURED");
  Upload stored(kMaxBytes, /*has_store=*/true, budget_);
  for (v1::PublishRequest part : {begin, Chunk(0, "hello"), Commit()}) {
    EXPECT_TRUE(stored.Accept(&part).ok());
  }
  EXPECT_TRUE(stored.TakeOptions().durable);
}

TEST_F(UploadTest, JoinsChunksAndChecksTheDigest) {
  v1::PublishRequest begin = Begin(5, Sha("hello"));
  begin.mutable_begin()->set_version(7);
  begin.mutable_begin()->set_activate(true);
  begin.mutable_begin()->set_expected_generation(3);
  (*begin.mutable_begin()->mutable_tags())["step"] = "12";
  EXPECT_EQ(Feed(begin), "");
  EXPECT_EQ(Feed(Chunk(0, "he")), "");
  EXPECT_EQ(Feed(Chunk(2, "llo")), "");
  EXPECT_FALSE(upload_->committed());
  EXPECT_EQ(Feed(Commit()), "");
  ASSERT_TRUE(upload_->committed());
  const adapter::PublishOptions options = upload_->TakeOptions();
  EXPECT_EQ(options.name, "a");
  EXPECT_EQ(options.version, 7);
  EXPECT_TRUE(options.activate);
  EXPECT_EQ(options.expected_generation, 3);
  EXPECT_EQ(options.tags.at("step"), "12");
  EXPECT_EQ(upload_->config(), "{}");
  const ByteBuffer image = *upload_->image();
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(image.data()), image.size()), "hello");
}

TEST_F(UploadTest, RefusesPartsOutOfOrder) {
  EXPECT_EQ(Feed(Chunk(0, "x")), "PUBLISH_OUT_OF_ORDER");
  EXPECT_EQ(Feed(Commit()), "PUBLISH_OUT_OF_ORDER");
  EXPECT_EQ(Feed(v1::PublishRequest()), "PUBLISH_OUT_OF_ORDER");
  EXPECT_EQ(Feed(Begin(1)), "");
  EXPECT_EQ(Feed(Begin(1)), "PUBLISH_OUT_OF_ORDER");
  EXPECT_EQ(Feed(Chunk(0, "x")), "");
  EXPECT_EQ(Feed(Commit()), "");
  EXPECT_EQ(Feed(Commit()), "PUBLISH_OUT_OF_ORDER");
}

TEST_F(UploadTest, RefusesGapsAndOverlaps) {
  EXPECT_EQ(Feed(Begin(10)), "");
  EXPECT_EQ(Feed(Chunk(1, "x")), "PUBLISH_OFFSET_MISMATCH");
  EXPECT_EQ(Feed(Chunk(0, "xy")), "");
  EXPECT_EQ(Feed(Chunk(1, "y")), "PUBLISH_OFFSET_MISMATCH");
  EXPECT_EQ(Feed(Chunk(~uint64_t{0}, "y")), "PUBLISH_OFFSET_MISMATCH");
}

TEST_F(UploadTest, RefusesMoreAndFewerBytesThanAnnounced) {
  EXPECT_EQ(Feed(Begin(3)), "");
  EXPECT_EQ(Feed(Chunk(0, "ab")), "");
  EXPECT_EQ(Feed(Commit()), "PUBLISH_SIZE_MISMATCH");
  EXPECT_EQ(Feed(Chunk(2, "cd")), "PUBLISH_SIZE_MISMATCH");
}

TEST_F(UploadTest, RefusesEmptyAndOversizedChunks) {
  EXPECT_EQ(Feed(Begin(kMaxBytes)), "");
  EXPECT_EQ(Feed(Chunk(0, "")), "PUBLISH_CHUNK_SIZE");
  EXPECT_EQ(Feed(Chunk(0, std::string(kMaxChunkBytes + 1, 'x'))), "PUBLISH_CHUNK_SIZE");
  EXPECT_EQ(Feed(Chunk(0, std::string(kMaxChunkBytes, 'x'))), "");
}

TEST_F(UploadTest, RefusesAnotherDigest) {
  EXPECT_EQ(Feed(Begin(1, Sha("x"))), "");
  EXPECT_EQ(Feed(Chunk(0, "y")), "");
  EXPECT_EQ(Feed(Commit()), "PUBLISH_SHA256_MISMATCH");
}

TEST_F(UploadTest, ListsEverythingWrongWithBegin) {
  v1::PublishRequest part = Begin(kMaxBytes + 1, "short");
  part.mutable_begin()->set_name("Bad/Name");
  part.mutable_begin()->set_version(0);
  part.mutable_begin()->clear_adapter_config_json();
  (*part.mutable_begin()->mutable_tags())[""] = "x";
  std::set<std::string> reasons;
  for (const Violation& v : ViolationsOf(upload_->Accept(&part))) reasons.insert(v.reason);
  EXPECT_EQ(reasons,
            (std::set<std::string>{"ADAPTER_NAME_INVALID", "ADAPTER_VERSION_INVALID",
                                   "TAGS_INVALID", "PUBLISH_CONFIG_SIZE",
                                   "PUBLISH_SIZE_OUT_OF_RANGE", "PUBLISH_SHA256_INVALID"}));
}

TEST_F(UploadTest, TakesTheConfigurationAsFieldsOrAsJsonButNotBoth) {
  v1::PublishRequest typed = Begin(1);
  typed.mutable_begin()->mutable_peft_config()->set_r(4);
  v1::PublishRequest both = typed;
  EXPECT_EQ(Feed(both), "PUBLISH_CONFIG_TWICE");
  typed.mutable_begin()->clear_adapter_config_json();
  EXPECT_EQ(Feed(typed), "");
  EXPECT_TRUE(upload_->typed_config());
  EXPECT_THAT(upload_->config(), HasSubstr("\"r\":4"));
}

TEST_F(UploadTest, RefusesAConfigurationTooLargeAsJson) {
  v1::PublishRequest part = Begin(1);
  part.mutable_begin()->clear_adapter_config_json();
  part.mutable_begin()->mutable_peft_config()->add_layers_pattern(std::string(1 << 20, 'x'));
  const absl::Status refusal = upload_->Accept(&part);
  EXPECT_EQ(ReasonOf(refusal), "PUBLISH_CONFIG_SIZE");
  EXPECT_EQ(ViolationsOf(refusal)[0].field, "peft_config");
}

TEST_F(UploadTest, SharesOneBudgetAndGivesItBack) {
  EXPECT_EQ(Fill(upload_.get(), kMaxBytes), "");
  auto second = std::make_unique<Upload>(kMaxBytes, false, budget_);
  EXPECT_EQ(Fill(second.get(), kMaxBytes), "");
  Upload third(kMaxBytes, false, budget_);
  v1::PublishRequest part = Begin(1);
  EXPECT_TRUE(third.Accept(&part).ok());
  part = Chunk(0, "x");
  const absl::Status busy = third.Accept(&part);
  EXPECT_EQ(ReasonOf(busy), "PUBLISH_BUSY");
  EXPECT_EQ(busy.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryAfterOf(busy).has_value());
  second.reset();
  EXPECT_TRUE(third.Accept(&part).ok());
}

TEST_F(UploadTest, LeavesTheBudgetToOthersUntilItsBytesCome) {
  std::vector<std::unique_ptr<Upload>> stalled;
  for (int i = 0; i < 4; ++i) {
    stalled.push_back(std::make_unique<Upload>(kMaxBytes, false, budget_));
    EXPECT_EQ(Fill(stalled.back().get(), kMaxBytes, /*come=*/kMaxChunkBytes), "");
  }
  EXPECT_EQ(Fill(upload_.get(), kMaxBytes), "");
}

TEST_F(UploadTest, OutlivesWhoSharedTheBudget) {
  const std::weak_ptr<UploadBudget> budget = budget_;
  EXPECT_EQ(Fill(upload_.get(), kMaxBytes), "");
  budget_.reset();
  EXPECT_FALSE(budget.expired());
  upload_.reset();
  EXPECT_TRUE(budget.expired());
}

// Bytes of the image's buffer that take memory.
int64_t ResidentBytes(const ByteBuffer& image) {
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(image.data()) / kPage * kPage;
  const uintptr_t end = reinterpret_cast<uintptr_t>(image.data()) + image.capacity();
  std::vector<unsigned char> pages((end - begin + kPage - 1) / kPage);
  EXPECT_EQ(mincore(reinterpret_cast<void*>(begin), end - begin, pages.data()), 0);
  const auto is_resident = [](unsigned char page) { return (page & 1) != 0; };
  return std::count_if(pages.begin(), pages.end(), is_resident) * static_cast<int64_t>(kPage);
}

TEST_F(UploadTest, HoldsNoMoreThanWhatHasCome) {
  constexpr int64_t kAnnounced = 256 << 20;
  Upload upload(kAnnounced, false, budget_);
  EXPECT_EQ(Fill(&upload, kAnnounced, /*come=*/1000), "");
  EXPECT_LE(ResidentBytes(*upload.image()), 4 << 20);
}

// The most memory that this process has taken since it was last reset, in bytes.
int64_t PeakMemory() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word && word != "VmHWM:") {
  }
  int64_t kib = 0;
  status >> kib;
  return kib << 10;
}

TEST_F(UploadTest, TakesNoMoreThanTheBudgetCountsWhileItsImageGrows) {
  // One chunk above a power of two: a buffer that doubled would be copied at the end.
  constexpr int64_t kSize = (64 << 20) + kMaxChunkBytes;
  if (!(std::ofstream("/proc/self/clear_refs") << 5).flush()) {
    GTEST_SKIP() << "the peak of the process's memory cannot be reset";
  }
  const int64_t before = PeakMemory();
  Upload upload(kSize, false, std::make_shared<UploadBudget>(kSize));
  EXPECT_EQ(Fill(&upload, kSize), "");
  EXPECT_LE(PeakMemory() - before, kSize + (16 << 20));
}

}  // namespace
}  // namespace dorad::rpc
