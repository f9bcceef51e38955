#include "server/adapter/store/store.h"

#include "tests/unit/support/fake_disk.h"

namespace dorad::adapter {
namespace {

namespace fs = std::filesystem;
using Type = Change::Type;

absl::Span<const std::byte> Bytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

std::string ReadText(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class StoreTest : public ::testing::Test {
 protected:
  StoreTest() { EXPECT_EQ(Open(), ""); }

  // The reason for which it could not be opened.
  std::string Open(const std::string& base = "base") {
    store_.reset();
    absl::StatusOr<std::unique_ptr<Store>> opened = Store::Open(path_, base, &disk_);
    if (opened.ok()) store_ = *std::move(opened);
    return ReasonOf(opened.status());
  }

  std::set<std::string> Objects() const {
    std::set<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(path_ / "objects")) {
      if (entry.path().filename().string().size() == 64) names.insert(entry.path().filename());
    }
    return names;
  }

  std::vector<fs::path> Temporary() const {
    std::vector<fs::path> paths;
    for (const auto& entry : fs::directory_iterator(path_ / "tmp")) paths.push_back(entry.path());
    return paths;
  }

  // Puts an object and lets the journal name it.
  std::string Publish(const std::string& name, int64_t version, const std::string& tensors,
                      bool activate = false) {
    const absl::StatusOr<std::string> object = store_->Put("{}", Bytes(tensors));
    EXPECT_TRUE(object.ok()) << object.status();
    Change change = {.type = Type::kPublished, .generation = ++generation_, .name = name};
    change.version = version;
    change.stored = {*object, "digest of " + tensors, absl::FromUnixNanos(12345), {{"k", "v"}}};
    change.activate = activate;
    EXPECT_TRUE(store_->Append(change).ok());
    return *object;
  }

  void Note(Type type, const std::string& name, int64_t version) {
    EXPECT_TRUE(
        store_
            ->Append({.type = type, .generation = ++generation_, .name = name, .version = version})
            .ok());
  }

  // Publishes a version with 10 kB of tags, and perhaps retires it. What the journal then adds up
  // to, however it does.
  StoredState NoteLong(const std::string& name, int64_t version, bool retire = true) {
    StoredState state = State();
    Change change = {.type = Type::kPublished, .generation = ++generation_, .name = name};
    change.version = version;
    change.stored = {"object", "digest", absl::FromUnixNanos(1), {{"k", std::string(10000, 'v')}}};
    for (const Type type : {Type::kPublished, Type::kRetired}) {
      change.type = type;
      if (type == Type::kRetired && !retire) break;
      EXPECT_TRUE(store_->Append(change).ok());
      state.Apply(change);
    }
    return state;
  }

  // As the journal says now.
  StoredState State() const {
    fs::copy_file(path_ / "journal", scratch_.path() / "copy",
                  fs::copy_options::overwrite_existing);
    Disk disk;
    std::vector<std::string> records;
    EXPECT_TRUE(Journal::Open(scratch_.path() / "copy", &disk, &records).ok());
    StoredState state;
    int64_t format = 0;
    for (const std::string& record : records) state.Apply(*ParseChange(record, &format));
    return state;
  }

  test::ScratchFolder scratch_;
  const fs::path path_ = scratch_.path() / "store";
  test::FakeDisk disk_;
  int64_t generation_ = 0;
  std::unique_ptr<Store> store_;
};

TEST_F(StoreTest, KeepsWhatWasPublishedAndForgetsWhatWasRetired) {
  const std::string one = Publish("a", 1, "one", true);
  const std::string two = Publish("a", 2, "two");
  Publish("b", 7, "three");
  Note(Type::kActivated, "a", 2);
  Note(Type::kRetired, "a", 1);
  Note(Type::kReserved, "a", 9);
  Note(Type::kReserved, "never-published", 3);
  ASSERT_EQ(Open(), "");
  const StoredState& state = store_->opened();
  EXPECT_EQ(state.base, "base");
  EXPECT_EQ(state.generation, generation_ + 1) << "the restart is a change, too";
  ASSERT_EQ(state.names.size(), 3u);
  const StoredState::Name& a = state.names.at("a");
  EXPECT_EQ(a.last_version, 9);
  EXPECT_EQ(a.active, 2);
  ASSERT_EQ(a.versions.size(), 1u);
  EXPECT_EQ(a.versions.at(2).object, two);
  EXPECT_EQ(a.versions.at(2).digest, "digest of two");
  EXPECT_EQ(a.versions.at(2).create_time, absl::FromUnixNanos(12345));
  EXPECT_THAT(a.versions.at(2).tags, ElementsAre(std::make_pair("k", "v")));
  EXPECT_EQ(state.names.at("never-published").last_version, 3);
  EXPECT_EQ(ReadText(store_->ObjectPath(two) + "/adapter_model.safetensors"), "two");
  EXPECT_EQ(ReadText(store_->ObjectPath(two) + "/adapter_config.json"), "{}");
  EXPECT_EQ(Objects().count(one), 0u) << "nothing refers to it";
}

// What no kill -9 can show: the order in which things reach the disk.
TEST_F(StoreTest, SyncsEachStepBeforeTheNextOneReliesOnIt) {
  disk_.note_calls = true;
  const std::string object = Publish("a", 1, "one");
  const std::string root = path_.string();
  const std::string tmp = root + "/tmp/1", shard = root + "/objects/" + object.substr(0, 2);
  EXPECT_THAT(disk_.calls, ElementsAre("write " + tmp + "/adapter_config.json",
                                       "sync " + tmp + "/adapter_config.json",
                                       "write " + tmp + "/adapter_model.safetensors",
                                       "sync " + tmp + "/adapter_model.safetensors", "sync " + tmp,
                                       "rename " + tmp + " " + shard + "/" + object,
                                       "sync " + shard, "sync " + root + "/objects",
                                       "write " + root + "/journal", "sync " + root + "/journal"));
  disk_.calls.clear();
  EXPECT_EQ(Publish("a", 2, "one"), object);
  EXPECT_THAT(disk_.calls, ElementsAre("sync " + shard, "sync " + root + "/objects",
                                       "write " + root + "/journal", "sync " + root + "/journal"))
      << "another's rename may not have been synced yet";
}

TEST_F(StoreTest, SyncsARewrittenJournalBeforeItsNameAndThenTheName) {
  for (int i = 1; i < 100; ++i) Note(Type::kReserved, "a", i);
  disk_.note_calls = true;
  ASSERT_EQ(Open(), "");
  const std::string journal = (path_ / "journal").string(), fresh = journal + ".new";
  ASSERT_GE(disk_.calls.size(), 4u);
  EXPECT_THAT(std::vector<std::string>(disk_.calls.end() - 4, disk_.calls.end()),
              ElementsAre("write " + fresh, "sync " + fresh, "rename " + fresh + " " + journal,
                          "sync " + path_.string()));
}

TEST_F(StoreTest, AnActiveVersionThatWasNotDurableIsActiveNoMore) {
  Publish("a", 1, "one", true);
  Note(Type::kReserved, "a", 2);
  Note(Type::kActivated, "a", 2);
  for (int restart = 0; restart < 2; ++restart) {
    ASSERT_EQ(Open(), "");
    EXPECT_EQ(store_->opened().names.at("a").active, 0);
    EXPECT_EQ(store_->opened().names.at("a").last_version, 2);
    EXPECT_EQ(store_->opened().names.at("a").versions.size(), 1u);
  }
}

TEST_F(StoreTest, EqualContentIsStoredOnceAndRemovedWithItsLastUse) {
  const std::string object = Publish("a", 1, "same");
  EXPECT_EQ(Publish("a", 2, "same"), object);
  const std::string other = Publish("a", 3, "other");
  EXPECT_THAT(Objects(), UnorderedElementsAre(object, other));
  ASSERT_EQ(Open(), "") << "uses are counted again";
  store_->Drop(object);
  EXPECT_EQ(Objects().count(object), 1u);
  store_->Drop(object);
  EXPECT_THAT(Objects(), ElementsAre(other));
  EXPECT_THAT(Temporary(), IsEmpty());
}

TEST_F(StoreTest, RemovesAtStartWhatNothingRefersTo) {
  const std::string kept = Publish("a", 1, "kept");
  ASSERT_TRUE(store_->Put("{}", Bytes("never journaled")).ok());
  fs::create_directories(path_ / "tmp" / "5");
  std::ofstream(path_ / "tmp" / "5" / "adapter_config.json") << "half";
  EXPECT_EQ(Objects().size(), 2u);
  ASSERT_EQ(Open(), "");
  EXPECT_THAT(Objects(), ElementsAre(kept));
  EXPECT_THAT(Temporary(), IsEmpty());
}

TEST_F(StoreTest, AFullDiskLeavesNothingBehind) {
  Publish("a", 1, "one");
  const std::set<std::string> before = Objects();
  const std::string journal = ReadText(path_ / "journal");
  for (const int error : {ENOSPC, EDQUOT, EIO}) {
    for (const size_t written : {0, 1, 2, 4}) {
      disk_.write_error = error;
      disk_.bytes_before_write_error = written;
      const absl::Status status = store_->Put("{}", Bytes("another")).status();
      EXPECT_EQ(ReasonOf(status), error == EIO ? "STORE_UNAVAILABLE" : "STORE_FULL");
      EXPECT_THAT(std::string(status.message()), Not(HasSubstr(path_.string())));
      EXPECT_EQ(Objects(), before);
      EXPECT_THAT(Temporary(), IsEmpty());
    }
  }
  disk_.write_error = 0;
  for (int* error : {&disk_.rename_error, &disk_.sync_error}) {
    *error = EIO;
    EXPECT_EQ(ReasonOf(store_->Put("{}", Bytes("another")).status()), "STORE_UNAVAILABLE");
    *error = 0;
    EXPECT_EQ(Objects(), before);
    EXPECT_THAT(Temporary(), IsEmpty());
  }
  EXPECT_EQ(ReadText(path_ / "journal"), journal);
  Publish("a", 2, "another");
  EXPECT_EQ(Objects().size(), 2u);
}

TEST_F(StoreTest, ADamagedObjectIsReplacedByTheSameContent) {
  const std::string object = Publish("a", 1, "content");
  std::ofstream(store_->ObjectPath(object) + "/adapter_model.safetensors") << "CONTENT";
  EXPECT_EQ(Publish("a", 2, "content"), object);
  EXPECT_EQ(ReadText(store_->ObjectPath(object) + "/adapter_model.safetensors"), "content");
  fs::remove_all(store_->ObjectPath(object));
  EXPECT_EQ(Publish("a", 3, "content"), object);
  EXPECT_EQ(ReadText(store_->ObjectPath(object) + "/adapter_model.safetensors"), "content");
  EXPECT_THAT(Temporary(), IsEmpty());
}

TEST_F(StoreTest, KeepsTheObjectsOfChangesWhoseFateIsUnknown) {
  const std::string object = *store_->Put("{}", Bytes("content"));
  disk_.sync_error = EIO;
  Change change = {.type = Type::kPublished, .generation = 1, .name = "a", .version = 1};
  change.stored.object = object;
  EXPECT_EQ(ReasonOf(store_->Append(change)), "STORE_UNAVAILABLE");
  disk_.sync_error = 0;
  store_->Drop(object);
  EXPECT_EQ(Objects().count(object), 1u) << "the journal may name it";
}

TEST_F(StoreTest, OneProcessAtATime) {
  const auto second = Store::Open(path_, "base", &disk_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(second.status()), "STORE_LOCKED");
  EXPECT_THAT(second.status().message(), HasSubstr((path_ / "lock").string()));
  EXPECT_EQ(Open(), "") << "free again";
}

TEST_F(StoreTest, BelongsToOneBaseModel) {
  EXPECT_EQ(Open("another base"), "STORE_OTHER_MODEL");
  EXPECT_EQ(Open(), "");
}

TEST_F(StoreTest, RefusesAJournalThatItDoesNotUnderstand) {
  store_.reset();
  const std::string started = ToJson({.base = "base"});
  for (const std::string& record :
       {std::string("[]"), std::string("{}"), std::string("{\"type\":\"moved\"}"),
        std::string(R"({"type":"started","generation":1,"format":1,"base":"base"})"),
        std::string(R"({"type":"retired","generation":1,"name":"a"})"),
        std::string(R"({"type":"retired","generation":1,"name":"a","version":1,"more":1})"),
        std::string(R"({"type":"retired","generation":1,"name":7,"version":1})")}) {
    std::ofstream(path_ / "journal", std::ios::trunc) << Journal::Format({started, record});
    EXPECT_EQ(Open(), "STORE_DAMAGED") << record;
  }
}

TEST_F(StoreTest, RewritesALongJournalWithTheSameState) {
  Publish("a", 1, "one", true);
  Publish("a", 2, "two");
  for (int i = 3; i < 100; ++i) Note(Type::kReserved, "a", i);
  Note(Type::kServed, "b", 5);
  Note(Type::kReserved, "b", 6);
  const auto before = fs::file_size(path_ / "journal");
  ASSERT_EQ(Open(), "");
  EXPECT_LT(fs::file_size(path_ / "journal"), before / 2);
  StoredState state = store_->opened();
  ASSERT_EQ(Open(), "");
  ++state.generation;
  EXPECT_EQ(store_->opened(), state);
  EXPECT_EQ(state.names.at("a").last_version, 99);
  EXPECT_EQ(state.names.at("a").active, 1);
}

TEST_F(StoreTest, ForgetsNamesUnderWhichNothingEverServed) {
  Publish("a", 1, "one", true);
  Note(Type::kServed, "b", 4);
  int64_t longest = 0;
  for (int i = 0; i < 2000; ++i) {
    Note(Type::kReserved, absl::StrCat("refused", i), 1'000'000'000'000'000);
    longest = std::max(longest, store_->stats().journal_bytes);
  }
  EXPECT_LT(longest, 70 << 10) << "2000 records of 100 bytes were written";
  EXPECT_GE(store_->stats().compactions, 2);
  ASSERT_EQ(Open(), "");
  ASSERT_EQ(Open(), "") << "what was left of them goes with the rewrite at the first start";
  EXPECT_EQ(store_->opened().floor, 0);
  ASSERT_EQ(store_->opened().names.size(), 2u);
  EXPECT_EQ(store_->opened().names.at("a").active, 1);
  EXPECT_EQ(store_->opened().names.at("b").last_served, 4);
}

// Format 2 did not tell which of the numbers that are not durable served.
TEST_F(StoreTest, ReadsAJournalOfTheFormatBefore) {
  const std::string object = Publish("a", 1, "one", true);
  std::vector<std::string> records = {
      R"({"type":"started","generation":0,"format":2,"base":"base"})"};
  Disk disk;
  store_.reset();
  std::vector<std::string> written;
  ASSERT_TRUE(Journal::Open(path_ / "journal", &disk, &written).ok());
  records.push_back(written.back());
  for (int i = 2; i < 100; ++i) {
    records.push_back(
        absl::StrCat(R"({"type":"reserved","generation":9,"name":"a","version":)", i, "}"));
  }
  records.push_back(R"({"type":"reserved","generation":9,"name":"b","version":5})");
  std::ofstream(path_ / "journal", std::ios::trunc) << Journal::Format(records);
  for (int restart = 0; restart < 3; ++restart) {
    ASSERT_EQ(Open(), "");
    const StoredState& state = store_->opened();
    EXPECT_EQ(state.generation, 10 + restart);
    EXPECT_EQ(state.names.at("a").versions.at(1).object, object);
    EXPECT_EQ(state.names.at("a").active, 1);
    EXPECT_EQ(state.names.at("a").last_version, 99);
    EXPECT_EQ(state.names.at("b").last_served, 5) << "it may have";
    // Reservations of this run are separate.
    Note(Type::kReserved, "c", restart + 1);
    EXPECT_EQ(State().names.at("c").last_served, 0);
  }
}

TEST_F(StoreTest, RewritesALongJournalWhileItRuns) {
  const std::string object = Publish("a", 1, "one", true);
  StoredState expected = State();
  int64_t longest = 0, most = 0;
  for (int version = 2; version < 40; ++version) {
    expected = NoteLong("b", version);
    const Store::Stats stats = store_->stats();
    EXPECT_EQ(stats.journal_bytes, static_cast<int64_t>(fs::file_size(path_ / "journal")));
    EXPECT_GE(stats.compactions, most);
    longest = std::max(longest, stats.journal_bytes);
    most = stats.compactions;
    // At any moment it says the same as if it had never been rewritten.
    EXPECT_EQ(State(), expected) << version;
  }
  EXPECT_GE(most, 5);
  EXPECT_LT(longest, 2 * (64 << 10)) << "38 records of 10 kB were written";
  EXPECT_THAT(Temporary(), IsEmpty());
  ASSERT_EQ(Open(), "");
  EXPECT_EQ(store_->opened().names, expected.names);
  EXPECT_EQ(Objects().count(object), 1u);
}

TEST_F(StoreTest, LeavesAJournalAloneThatIsLongBecauseItsStateIs) {
  for (int version = 1; version <= 30; ++version) NoteLong("a", version, /*retire=*/false);
  EXPECT_EQ(store_->stats().compactions, 0);
  EXPECT_GT(store_->stats().journal_bytes, 4 * (64 << 10));
}

TEST_F(StoreTest, AnActiveVersionThatIsNotDurableIsKeptWhenTheJournalIsRewritten) {
  Publish("a", 1, "one", true);
  Note(Type::kActivated, "a", 2);
  for (int version = 1; version < 10; ++version) NoteLong("b", version);
  EXPECT_GE(store_->stats().compactions, 1);
  EXPECT_EQ(State().names.at("a").active, 2) << "the next start tells of it";
  ASSERT_EQ(Open(), "");
  EXPECT_EQ(store_->opened().names.at("a").active, 0);
}

TEST_F(StoreTest, AChangeStandsAlthoughTheJournalCannotBeRewritten) {
  StoredState expected;
  disk_.rename_error = ENOSPC;
  for (int version = 1; version < 20; ++version) expected = NoteLong("a", version);
  EXPECT_EQ(State(), expected);
  EXPECT_EQ(store_->stats().compactions, 0);
  const int64_t failures = store_->stats().failures.at("STORE_FULL");
  EXPECT_GE(failures, 1);
  EXPECT_LE(failures, 3) << "it is not tried again with each change";
  disk_.rename_error = 0;
  for (int version = 20; version < 50; ++version) expected = NoteLong("a", version);
  EXPECT_GE(store_->stats().compactions, 1);
  EXPECT_EQ(State(), expected);
}

TEST_F(StoreTest, TellsWhatItHoldsAndWhatItDid) {
  const std::string one = Publish("a", 1, "content");
  EXPECT_EQ(Publish("b", 1, "content"), one);
  Publish("a", 2, "four");
  const auto check = [this](int64_t objects, int64_t bytes) {
    const Store::Stats stats = store_->stats();
    EXPECT_EQ(stats.objects, objects);
    EXPECT_EQ(stats.object_bytes, bytes);
    EXPECT_EQ(stats.journal_bytes, static_cast<int64_t>(fs::file_size(path_ / "journal")));
  };
  check(2, 2 + 7 + 2 + 4);
  EXPECT_EQ(store_->stats().appends, 3);
  EXPECT_GT(store_->stats().append_time, absl::ZeroDuration());
  EXPECT_THAT(store_->stats().failures, IsEmpty());
  disk_.write_error = ENOSPC;
  EXPECT_FALSE(store_->Put("{}", Bytes("more")).ok());
  EXPECT_FALSE(store_->Append({.type = Type::kRetired, .name = "a", .version = 2}).ok());
  disk_.write_error = EIO;
  EXPECT_FALSE(store_->Append({.type = Type::kRetired, .name = "a", .version = 2}).ok());
  disk_.write_error = 0;
  EXPECT_THAT(store_->stats().failures,
              ElementsAre(std::make_pair("STORE_FULL", 2), std::make_pair("STORE_UNAVAILABLE", 1)));
  EXPECT_EQ(store_->stats().appends, 5);
  check(2, 2 + 7 + 2 + 4);
  store_->Drop(one);
  check(2, 2 + 7 + 2 + 4);
  store_->Drop(one);
  check(1, 2 + 4);
  ASSERT_EQ(Open(), "");
  check(1, 2 + 4);  // the journal names the other, but it is not there
}

TEST_F(StoreTest, ConcurrentPublishersOfFewContentsLeaveExactlyWhatIsUsed) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 20; ++i) {
        const std::string content = std::to_string((t + i) % 3);
        const absl::StatusOr<std::string> object = store_->Put("{}", Bytes(content));
        ASSERT_TRUE(object.ok()) << object.status();
        EXPECT_EQ(ReadText(store_->ObjectPath(*object) + "/adapter_model.safetensors"), content);
        store_->Drop(*object);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(Objects(), IsEmpty());
  EXPECT_THAT(Temporary(), IsEmpty());
}

TEST(ChangeTest, EveryKindSurvivesItsJson) {
  Change change = {.type = Type::kPublished, .generation = 7, .name = "a", .version = 3};
  change.stored = {"object",
                   "digest",
                   absl::FromUnixNanos(1'700'000'000'123'456'789),
                   {{"text", "ä\n\"\\\x01"}, {"", ""}},
                   /*pinned=*/true};
  change.activate = true;
  const std::string json = ToJson(change);
  EXPECT_EQ(json.find('\n'), std::string::npos);
  int64_t format = 0;
  const Change started = {.generation = 4, .base = "0123", .floor = 5};
  EXPECT_EQ(*ParseChange(ToJson(started), &format), started);
  EXPECT_EQ(*ParseChange(json, &format), change);
  for (const Type type : {Type::kReserved, Type::kServed, Type::kActivated, Type::kRetired}) {
    const Change other = {.type = type, .generation = 1, .name = "b", .version = 2};
    EXPECT_EQ(*ParseChange(ToJson(other), &format), other);
  }
}

}  // namespace
}  // namespace dorad::adapter
