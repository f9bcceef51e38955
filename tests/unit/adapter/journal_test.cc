#include "server/adapter/store/journal.h"

#include "tests/unit/support/fake_disk.h"

namespace dorad::adapter {
namespace {

class JournalTest : public ::testing::Test {
 protected:
  absl::Status Open() {
    records_.clear();
    journal_.reset();
    absl::StatusOr<std::unique_ptr<Journal>> opened = Journal::Open(path_, &disk_, &records_);
    if (opened.ok()) journal_ = *std::move(opened);
    return opened.status();
  }

  std::string Content() const {
    std::ifstream in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  void SetContent(const std::string& content) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << content;
  }

  // Of the file that is to take its place.
  std::string FreshPath() const { return path_ + ".new"; }

  test::ScratchFolder folder_;
  const std::string path_ = folder_.path() / "journal";
  test::FakeDisk disk_;
  std::vector<std::string> records_;
  std::unique_ptr<Journal> journal_;
};

TEST_F(JournalTest, GivesBackWhatWasAppended) {
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(records_, IsEmpty());
  EXPECT_TRUE(journal_->Append("one").ok());
  EXPECT_TRUE(journal_->Append("{\"two\": 2}").ok());
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(records_, ElementsAre("one", "{\"two\": 2}"));
  EXPECT_TRUE(journal_->Append("three").ok());
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(records_, ElementsAre("one", "{\"two\": 2}", "three"));
  EXPECT_EQ(journal_->bytes(), static_cast<int64_t>(Content().size()));
  EXPECT_EQ(Content(), Journal::Format(records_));
}

TEST_F(JournalTest, CutsOffALastRecordThatEndsAtAnyByte) {
  const std::vector<std::string> kept = {"first", "second"};
  const std::string before = Journal::Format(kept);
  const std::string whole = Journal::Format({"first", "second", "the third one"});
  for (size_t end = before.size(); end < whole.size(); ++end) {
    // Cut short, or with bytes that never came and read as NULs.
    for (const size_t missing : {size_t{0}, whole.size() - end, size_t{4096}}) {
      SetContent(whole.substr(0, end) + std::string(missing, '\0'));
      ASSERT_TRUE(Open().ok()) << end;
      EXPECT_THAT(records_, ElementsAreArray(kept)) << end;
      EXPECT_EQ(Content(), before) << end;
      EXPECT_TRUE(journal_->Append("the third one").ok());
      EXPECT_EQ(Content(), whole) << end;
    }
  }
}

TEST_F(JournalTest, RefusesAnyChangedByteAndNamesItsRecord) {
  const std::string first = Journal::Format({"first"});
  const std::string whole = Journal::Format({"first", "second", "third"});
  const std::string two = Journal::Format({"first", "second"});
  for (size_t at = 0; at < whole.size(); ++at) {
    for (const int change : {0x01, 0x04, 0x80}) {
      std::string content = whole;
      content[at] = static_cast<char>(content[at] ^ change);
      SetContent(content);
      const absl::Status status = Open();
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << at;
      EXPECT_EQ(ReasonOf(status), "STORE_DAMAGED") << at;
      const size_t record = at < first.size() ? 0 : at < two.size() ? first.size() : two.size();
      EXPECT_THAT(status.message(),
                  HasSubstr(absl::StrCat(path_, " is damaged at byte ", record, " of")));
      EXPECT_EQ(Content(), content) << "a damaged file is left as it is";
    }
  }
}

TEST_F(JournalTest, RefusesMissingAndMovedRecords) {
  const std::string one = Journal::Format({"one"});
  const std::string two = Journal::Format({"one", "two"}).substr(one.size());
  const std::string three =
      Journal::Format({"one", "two", "three"}).substr(one.size() + two.size());
  for (const std::string& content : {one + three, two + three, one + three + two, one + one}) {
    SetContent(content);
    EXPECT_EQ(ReasonOf(Open()), "STORE_DAMAGED");
  }
}

TEST_F(JournalTest, AFailedAppendLeavesTheFileAsItWas) {
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(journal_->Append("good").ok());
  const std::string before = Content();
  for (const int error : {ENOSPC, EDQUOT, EIO}) {
    for (const size_t written : {0, 1, 20, 30}) {
      disk_.write_error = error;
      disk_.bytes_before_write_error = written;
      const absl::Status status = journal_->Append("does not fit");
      EXPECT_EQ(ReasonOf(status), error == EIO ? "STORE_UNAVAILABLE" : "STORE_FULL");
      EXPECT_EQ(status.code(), error == EIO ? absl::StatusCode::kUnavailable
                                            : absl::StatusCode::kResourceExhausted);
      EXPECT_EQ(Content(), before);
      EXPECT_FALSE(journal_->broken());
    }
  }
  disk_.write_error = 0;
  EXPECT_TRUE(journal_->Append("fits").ok());
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(records_, ElementsAre("good", "fits"));
}

TEST_F(JournalTest, TakesNoMoreWhenAFailureCannotBeUndone) {
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(journal_->Append("good").ok());
  disk_.sync_error = EIO;
  EXPECT_EQ(ReasonOf(journal_->Append("unknown")), "STORE_UNAVAILABLE");
  EXPECT_TRUE(journal_->broken());
  disk_.sync_error = 0;
  EXPECT_EQ(ReasonOf(journal_->Append("refused")), "STORE_UNAVAILABLE");
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(records_, ElementsAre("good"));
}

TEST_F(JournalTest, RewritesTheFileInOneStep) {
  ASSERT_TRUE(Open().ok());
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(journal_->Append(absl::StrCat("record ", i)).ok());
  ASSERT_TRUE(journal_->Rewrite({"short"}).ok());
  EXPECT_EQ(Content(), Journal::Format({"short"}));
  EXPECT_TRUE(journal_->Append("more").ok());
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(records_, ElementsAre("short", "more"));
}

TEST_F(JournalTest, AFailedRewriteLeavesTheOldFileWhichGoesOn) {
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(journal_->Append("old").ok());
  const auto fails = [this](int error) {
    EXPECT_EQ(ReasonOf(journal_->Rewrite({"new"})),
              error == EIO ? "STORE_UNAVAILABLE" : "STORE_FULL");
    EXPECT_FALSE(journal_->broken());
    EXPECT_FALSE(std::filesystem::exists(FreshPath()));
    EXPECT_EQ(Content(), Journal::Format({"old"}));
  };
  for (const int error : {ENOSPC, EIO}) {
    disk_.write_error = error;
    disk_.bytes_before_write_error = 5;
    fails(error);
    disk_.write_error = 0;
    disk_.sync_error = error;
    fails(error);
    disk_.sync_error = 0;
  }
  disk_.rename_error = ENOSPC;
  fails(ENOSPC);
  disk_.rename_error = 0;
  EXPECT_TRUE(journal_->Append("more").ok());
  EXPECT_TRUE(journal_->Rewrite({"new"}).ok());
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(records_, ElementsAre("new"));
}

TEST_F(JournalTest, TakesNoMoreWhenItIsNotKnownWhichFileIsThere) {
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(journal_->Append("old").ok());
  disk_.rename_error = EIO;
  EXPECT_EQ(ReasonOf(journal_->Rewrite({"new"})), "STORE_UNAVAILABLE");
  disk_.rename_error = 0;
  EXPECT_TRUE(journal_->broken());
  EXPECT_EQ(ReasonOf(journal_->Append("more")), "STORE_UNAVAILABLE");
  EXPECT_EQ(ReasonOf(journal_->Rewrite({"new"})), "STORE_UNAVAILABLE");
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(records_, ElementsAre("old"));
  // The new name may not last: a record that was appended to its file would go with it.
  disk_.on_rename = [this] { disk_.sync_error = EIO; };
  EXPECT_EQ(ReasonOf(journal_->Rewrite({"new"})), "STORE_UNAVAILABLE");
  disk_.sync_error = 0;
  EXPECT_EQ(ReasonOf(journal_->Append("more")), "STORE_UNAVAILABLE");
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(records_, ElementsAre("new"));
}

TEST_F(JournalTest, OpeningRemovesWhatACrashLeftOfARewrite) {
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(journal_->Append("old").ok());
  const std::string fresh = Journal::Format({"the", "new", "ones"});
  for (const size_t written : {size_t{0}, size_t{1}, fresh.size() / 2, fresh.size()}) {
    std::ofstream(FreshPath(), std::ios::binary) << fresh.substr(0, written);
    ASSERT_TRUE(Open().ok());
    EXPECT_THAT(records_, ElementsAre("old"));
    EXPECT_FALSE(std::filesystem::exists(FreshPath()));
  }
}

}  // namespace
}  // namespace dorad::adapter
