#include "server/rpc/upload_store.h"

#include "tests/unit/support/publish_parts.h"
#include "tests/unit/support/test.h"

namespace dorad::rpc {
namespace {

using Next = UploadStream::Next;

constexpr int64_t kMaxBytes = 4 << 20;  // of one upload

v1::PublishRequest Begin(const std::string& id, uint64_t size) {
  v1::PublishRequest part = rpc::Begin(size);
  if (!id.empty()) part.mutable_begin()->set_upload_id(id);
  return part;
}

// A stream and its notifications.
struct Client {
  // Outlives the client: an answer may come later.
  struct Told {
    std::string ended;
    std::optional<absl::StatusOr<adapter::PublishResult>> answer;
  };

  explicit Client(UploadStore* store, const std::string& tenant = "")
      : stream(std::make_unique<UploadStream>(
            store, [told = told](const absl::Status& status) { told->ended = ReasonOf(status); },
            [told = told](const absl::StatusOr<adapter::PublishResult>& result) {
              told->answer = result;
            },
            tenant)) {}

  // The refusal's reason; "" for none.
  std::string Feed(v1::PublishRequest part) {
    const absl::StatusOr<Next> accepted = stream->Accept(&part);
    if (accepted.ok()) next = *accepted;
    return ReasonOf(accepted.status());
  }
  // Begin and all of `data`.
  std::string Send(const std::string& id, const std::string& data) {
    const std::string refusal = Feed(Begin(id, data.size()));
    return refusal.empty() ? Feed(Chunk(0, data)) : refusal;
  }

  std::shared_ptr<Told> told = std::make_shared<Told>();
  std::optional<Next> next;
  std::unique_ptr<UploadStream> stream;
};

class UploadStoreTest : public testing::Test {
 protected:
  static adapter::PublishResult Result(int64_t version) {
    adapter::PublishResult result;
    result.adapter.version = version;
    return result;
  }
  // Sends `data` as the upload `id` and breaks off.
  void Leave(const std::string& id, const std::string& data, uint64_t size) {
    Client client(&store_);
    ASSERT_EQ(client.Feed(Begin(id, size)), "");
    for (size_t at = 0; at < data.size(); at += kMaxChunkBytes) {
      ASSERT_EQ(client.Feed(Chunk(at, data.substr(at, kMaxChunkBytes))), "");
    }
  }
  uint64_t Received(const std::string& id) {
    const auto progress = store_.Find(id);
    return progress.ok() ? progress->received : ~uint64_t{0};
  }

  UploadStore store_{{kMaxBytes, 2 * kMaxBytes, absl::Minutes(10)}};
};

TEST_F(UploadStoreTest, GoesOnWithABrokenUpload) {
  Leave("u", "hel", 5);
  const auto progress = store_.Find("u");
  ASSERT_TRUE(progress.ok());
  EXPECT_EQ(progress->received, 3u);
  EXPECT_EQ(progress->total, 5u);
  EXPECT_FALSE(progress->committed);
  EXPECT_LE(progress->time_left, absl::Minutes(10));
  EXPECT_GT(progress->time_left, absl::Minutes(9));
  EXPECT_EQ(store_.idle().uploads, 1);
  EXPECT_EQ(store_.idle().bytes, 3);
  Client second(&store_);
  EXPECT_EQ(second.Feed(Begin("u", 5)), "");
  EXPECT_EQ(store_.idle().uploads, 0);
  EXPECT_EQ(second.Feed(Chunk(3, "lo")), "");
  EXPECT_EQ(second.Feed(Commit()), "");
  ASSERT_EQ(second.next, Next::kLoad);
  const ByteBuffer image = *second.stream->TakeUpload()->image();
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(image.data()), image.size()), "hello");
}

TEST_F(UploadStoreTest, OffersTheFilesOfAnUploadUntilItsLoadHasEnded) {
  const std::string sha(32, 's');
  v1::PublishRequest begin = Begin("u", 5);
  begin.mutable_begin()->set_version(7);
  begin.mutable_begin()->set_safetensors_sha256(sha);
  const UploadStore::FileKey key{begin.begin().name(), 7, sha};
  EXPECT_EQ(store_.AwaitFiles(key, absl::ZeroDuration()), nullptr);
  std::shared_ptr<ArrivingFiles> awaited;
  std::thread reader([&] { awaited = store_.AwaitFiles(key, absl::Seconds(60)); });
  auto client = std::make_unique<Client>(&store_);
  ASSERT_EQ(client->Feed(begin), "");
  reader.join();
  ASSERT_NE(awaited, nullptr);
  EXPECT_EQ(store_.AwaitFiles({key.name, 8, sha}, absl::ZeroDuration()), nullptr);
  EXPECT_EQ(store_.AwaitFiles({key.name, 7, std::string(32, 't')}, absl::ZeroDuration()), nullptr);
  ASSERT_EQ(client->Feed(Chunk(0, "hel")), "");
  EXPECT_EQ(awaited->Bytes(0, awaited->received()), "hel");
  // Without a stream the upload is still there.
  client.reset();
  EXPECT_FALSE(awaited->ended());
  EXPECT_EQ(store_.AwaitFiles(key, absl::ZeroDuration()), awaited);
  awaited.reset();
}

TEST_F(UploadStoreTest, EndsTheFilesOfAnUploadThatIsDropped) {
  std::shared_ptr<ArrivingFiles> files;
  {
    UploadStore store({kMaxBytes, 2 * kMaxBytes, absl::Minutes(10)});
    Client client(&store);
    v1::PublishRequest begin = Begin("u", 5);
    begin.mutable_begin()->set_version(7);
    begin.mutable_begin()->set_safetensors_sha256(std::string(32, 's'));
    const UploadStore::FileKey key{begin.begin().name(), 7, std::string(32, 's')};
    ASSERT_EQ(client.Feed(begin), "");
    files = store.AwaitFiles(key, absl::ZeroDuration());
    ASSERT_NE(files, nullptr);
    ASSERT_EQ(client.Feed(Chunk(0, "hello")), "");
    EXPECT_EQ(client.Feed(Commit()), "PUBLISH_SHA256_MISMATCH");
    EXPECT_EQ(store.AwaitFiles(key, absl::ZeroDuration()), nullptr);
    client.stream.reset();
  }
  EXPECT_TRUE(files->ended());
}

TEST_F(UploadStoreTest, KeepsTheUploadsOfTenantsApart) {
  Leave("u", "hel", 5);
  EXPECT_EQ(ReasonOf(store_.Find("u", "team-a").status()), "UPLOAD_NOT_FOUND");
  Client other(&store_, "team-a");
  // Neither takes the other one over nor has to send an equal Begin.
  EXPECT_EQ(other.Feed(Begin("u", 7)), "");
  EXPECT_EQ(other.Feed(Chunk(0, "HELLO")), "");
  EXPECT_EQ(Received("u"), 3u);
  EXPECT_EQ(store_.Find("u", "team-a")->received, 5u);
}

TEST_F(UploadStoreTest, KeepsNothingWithoutAnId) {
  Client client(&store_);
  EXPECT_EQ(client.Send("", "hello"), "");
  client.stream.reset();
  EXPECT_EQ(store_.idle().uploads, 0);
  EXPECT_EQ(ReasonOf(store_.Find("").status()), "UPLOAD_NOT_FOUND");
}

TEST_F(UploadStoreTest, GoesOnOnlyWhereTheUploadStands) {
  Leave("u", "hel", 5);
  Client wrong(&store_);
  EXPECT_EQ(wrong.Feed(Begin("u", 5)), "");
  EXPECT_EQ(wrong.Feed(Chunk(0, "hello")), "PUBLISH_OFFSET_MISMATCH");
  wrong.stream.reset();
  EXPECT_EQ(Received("u"), 3u);
}

TEST_F(UploadStoreTest, RefusesAnotherBeginAndNamesTheFieldsThatDiffer) {
  v1::PublishRequest begin = Begin("u", 5);
  (*begin.mutable_begin()->mutable_tags())["step"] = "1";
  begin.mutable_begin()->set_activate(true);
  Client first(&store_);
  EXPECT_EQ(first.Feed(begin), "");
  v1::PublishRequest other = begin;
  (*other.mutable_begin()->mutable_tags())["step"] = "2";
  other.mutable_begin()->set_version(3);
  other.mutable_begin()->set_activate(false);
  Client second(&store_);
  const absl::Status refusal = second.stream->Accept(&other).status();
  EXPECT_EQ(refusal.code(), absl::StatusCode::kInvalidArgument);
  std::vector<std::string> fields;
  for (const Violation& v : ViolationsOf(refusal)) {
    EXPECT_EQ(v.reason, "UPLOAD_BEGIN_DIFFERS");
    fields.push_back(v.field);
  }
  EXPECT_THAT(fields, UnorderedElementsAre("tags", "version", "activate"));
  EXPECT_EQ(first.told->ended, "");
  EXPECT_EQ(first.Feed(Chunk(0, "hello")), "");
}

TEST_F(UploadStoreTest, TagsInAnotherOrderAreTheSameBegin) {
  v1::PublishRequest begin = Begin("u", 5);
  for (int i = 0; i < 20; ++i) (*begin.mutable_begin()->mutable_tags())[absl::StrCat(i)] = "x";
  v1::PublishRequest same = Begin("u", 5);
  for (int i = 20; i-- > 0;) (*same.mutable_begin()->mutable_tags())[absl::StrCat(i)] = "x";
  Client first(&store_), second(&store_);
  EXPECT_EQ(first.Feed(begin), "");
  EXPECT_EQ(second.Feed(same), "");
}

TEST_F(UploadStoreTest, TheNewerStreamTakesOver) {
  Client older(&store_), newer(&store_);
  EXPECT_EQ(older.Feed(Begin("u", 5)), "");
  EXPECT_EQ(older.Feed(Chunk(0, "he")), "");
  EXPECT_EQ(newer.Feed(Begin("u", 5)), "");
  EXPECT_EQ(older.told->ended, "UPLOAD_TAKEN_OVER");
  EXPECT_EQ(older.Feed(Chunk(2, "XX")), "UPLOAD_TAKEN_OVER");
  older.stream.reset();
  EXPECT_EQ(newer.Feed(Chunk(2, "llo")), "");
  EXPECT_EQ(newer.Feed(Commit()), "");
  EXPECT_EQ(newer.next, Next::kLoad);
}

TEST_F(UploadStoreTest, ARepeatedBeginGetsTheResultOfTheCommit) {
  Client first(&store_);
  EXPECT_EQ(first.Send("u", "hello"), "");
  EXPECT_EQ(first.Feed(Commit()), "");
  const auto done = first.stream->Completion();
  first.stream->TakeUpload();
  first.stream.reset();  // its client is gone
  EXPECT_TRUE(store_.Find("u")->committed);

  Client meanwhile(&store_);
  EXPECT_EQ(meanwhile.Feed(Begin("u", 5)), "");
  EXPECT_EQ(meanwhile.next, Next::kAnswer);
  EXPECT_FALSE(meanwhile.told->answer.has_value());
  done(Result(7));
  EXPECT_EQ((*meanwhile.told->answer)->adapter.version, 7);
  EXPECT_EQ((*first.told->answer)->adapter.version, 7);

  Client later(&store_);
  EXPECT_EQ(later.Feed(Begin("u", 5)), "");
  EXPECT_EQ(later.next, Next::kAnswer);
  EXPECT_EQ((*later.told->answer)->adapter.version, 7);
  Client other(&store_);
  EXPECT_EQ(other.Feed(Begin("u", 6)), "UPLOAD_BEGIN_DIFFERS");
}

TEST_F(UploadStoreTest, AStreamThatFindsTheUploadCommittedGetsItsResult) {
  Client older(&store_), newer(&store_);
  EXPECT_EQ(older.Send("u", "hello"), "");
  EXPECT_EQ(newer.Feed(Begin("u", 5)), "");
  EXPECT_EQ(newer.Feed(Commit()), "");
  const auto done = newer.stream->Completion();
  Client newest(&store_);
  EXPECT_EQ(newest.Feed(Begin("u", 5)), "");
  EXPECT_EQ(newest.next, Next::kAnswer);
  done(Result(1));
  EXPECT_EQ((*newest.told->answer)->adapter.version, 1);
}

TEST_F(UploadStoreTest, RemembersARefusalUnlessTheServerWasShortOfSomething) {
  using Code = absl::StatusCode;
  const std::map<std::string, absl::Status> refusals = {
      {"bad", MakeInvalid("adapter", {{"x", "ADAPTER_NOT_FINITE", "NaN"}})},
      {"taken", MakeError(Code::kAborted, "GENERATION_MISMATCH", "moved")},
      {"busy", WithRetryAfter(MakeError(Code::kResourceExhausted, "LOAD_QUEUE_FULL", "full"),
                              absl::Seconds(1))},
      {"memory", MakeError(Code::kResourceExhausted, "OUT_OF_MEMORY", "none")},
      {"full", MakeError(Code::kResourceExhausted, "STORE_FULL", "full")},
      {"disk", MakeError(Code::kUnavailable, "STORE_UNAVAILABLE", "I/O error")},
  };
  for (const auto& [id, result] : refusals) {
    Client client(&store_);
    EXPECT_EQ(client.Send(id, "hello"), "");
    EXPECT_EQ(client.Feed(Commit()), "");
    client.stream->Completion()(result);
    EXPECT_EQ(client.told->answer->status(), result);
  }
  for (const char* id : {"bad", "taken"}) {
    Client again(&store_);
    EXPECT_EQ(again.Feed(Begin(id, 5)), "");
    EXPECT_EQ(again.told->answer->status(), refusals.at(id));
  }
  for (const char* id : {"busy", "memory", "full", "disk"}) {
    EXPECT_EQ(ReasonOf(store_.Find(id).status()), "UPLOAD_NOT_FOUND") << id;
    Client again(&store_);
    EXPECT_EQ(again.Send(id, "hello"), "");
    EXPECT_EQ(again.Feed(Commit()), "");
    EXPECT_EQ(again.next, Next::kLoad) << id;
  }
}

TEST_F(UploadStoreTest, WrongBytesAtCommitDropTheUpload) {
  v1::PublishRequest begin = Begin("sha", 2);
  begin.mutable_begin()->set_safetensors_sha256(std::string(32, 'x'));
  Client wrong(&store_);
  EXPECT_EQ(wrong.Feed(begin), "");
  EXPECT_EQ(wrong.Feed(Chunk(0, "ab")), "");
  EXPECT_EQ(wrong.Feed(Commit()), "PUBLISH_SHA256_MISMATCH");
  Client few(&store_);
  EXPECT_EQ(few.Feed(Begin("size", 2)), "");
  EXPECT_EQ(few.Feed(Commit()), "PUBLISH_SIZE_MISMATCH");
  EXPECT_EQ(ReasonOf(store_.Find("sha").status()), "UPLOAD_NOT_FOUND");
  EXPECT_EQ(ReasonOf(store_.Find("size").status()), "UPLOAD_NOT_FOUND");
  EXPECT_EQ(few.Feed(Chunk(0, "a")), "UPLOAD_NOT_FOUND");
}

TEST_F(UploadStoreTest, RefusesIdsThatAreNone) {
  for (const std::string& id : {std::string(), std::string(129, 'a'), std::string("a b"),
                                std::string("a/b"), std::string("\xc3\xa4")}) {
    v1::PublishRequest begin = Begin("", 5);
    begin.mutable_begin()->set_upload_id(id);
    Client client(&store_);
    EXPECT_EQ(client.Feed(begin), "UPLOAD_ID_INVALID") << id;
  }
  Client client(&store_);
  EXPECT_EQ(client.Feed(Begin(std::string(128, 'Z'), 5)), "");
}

TEST_F(UploadStoreTest, IdleUploadsMakeRoomForBytesThatComeTheOldestFirst) {
  const std::string full(kMaxBytes, 'x');
  Leave("old", full, kMaxBytes);
  Leave("new", full, kMaxBytes);
  Client client(&store_);
  EXPECT_EQ(client.Send("", "y"), "");
  EXPECT_EQ(ReasonOf(store_.Find("old").status()), "UPLOAD_NOT_FOUND");
  EXPECT_EQ(Received("new"), static_cast<uint64_t>(kMaxBytes));
}

TEST_F(UploadStoreTest, UploadsWithAStreamMakeNoRoom) {
  const std::string data(kMaxChunkBytes, 'x');
  std::vector<std::unique_ptr<Client>> running;
  for (int i = 0; i < 2; ++i) {
    running.push_back(std::make_unique<Client>(&store_));
    EXPECT_EQ(running.back()->Feed(Begin(absl::StrCat("r", i), kMaxBytes)), "");
    for (uint64_t at = 0; at < kMaxBytes; at += kMaxChunkBytes) {
      EXPECT_EQ(running.back()->Feed(Chunk(at, data)), "");
    }
  }
  Client client(&store_);
  EXPECT_EQ(client.Send("late", "y"), "PUBLISH_BUSY");
  client.stream.reset();
  running.pop_back();
  Client again(&store_);
  EXPECT_EQ(again.Feed(Begin("late", 1)), "");
  EXPECT_EQ(again.Feed(Chunk(0, "y")), "");
}

TEST_F(UploadStoreTest, KeepsABoundedNumberOfIdleUploads) {
  for (int i = 0; i <= UploadStore::kMaxIdle; ++i) Leave(absl::StrCat("u", i), "x", 2);
  EXPECT_EQ(store_.idle().uploads, UploadStore::kMaxIdle);
  EXPECT_EQ(ReasonOf(store_.Find("u0").status()), "UPLOAD_NOT_FOUND");
  EXPECT_EQ(Received("u1"), 1u);
}

TEST_F(UploadStoreTest, ATenantWithManyUploadsPushesOutItsOwn) {
  Leave("mine", "x", 2);
  for (int i = 0; i < 2 * UploadStore::kMaxIdle; ++i) {
    Client other(&store_, "other");
    EXPECT_EQ(other.Feed(Begin(absl::StrCat("u", i), 2)), "");
  }
  EXPECT_EQ(store_.idle().uploads, UploadStore::kMaxIdle);
  EXPECT_EQ(Received("mine"), 1u);
}

TEST_F(UploadStoreTest, RoomForBytesComesFromTheTenantThatHasTheMost) {
  Leave("mine", "x", 2);  // the oldest
  const std::string full(kMaxChunkBytes, 'x');
  Client large(&store_, "other");
  EXPECT_EQ(large.Feed(Begin("large", kMaxBytes)), "");
  for (uint64_t at = 0; at < kMaxBytes; at += kMaxChunkBytes) {
    EXPECT_EQ(large.Feed(Chunk(at, full)), "");
  }
  large.stream.reset();
  Client client(&store_);
  EXPECT_EQ(client.Feed(Begin("", kMaxBytes)), "");
  for (uint64_t at = 0; at < kMaxBytes; at += kMaxChunkBytes) {
    EXPECT_EQ(client.Feed(Chunk(at, full)), "");
  }
  EXPECT_EQ(ReasonOf(store_.Find("large", "other").status()), "UPLOAD_NOT_FOUND");
  EXPECT_EQ(Received("mine"), 1u);
}

// Each alone, since what wakes the collector for one drops the other, too; and twice, since at
// first it may not have begun to wait.
TEST(UploadStoreTimeTest, DropsWhatNobodyGoesOnWithWithoutBeingAsked) {
  UploadStore store({kMaxBytes, kMaxBytes, absl::Milliseconds(50)});
  Client running(&store);
  EXPECT_EQ(running.Send("running", "x"), "");
  for (int round = 0; round < 2; ++round) {
    {
      Client client(&store);
      EXPECT_EQ(client.Feed(Begin("idle", kMaxBytes)), "");
      EXPECT_EQ(client.Feed(Chunk(0, std::string(kMaxChunkBytes, 'x'))), "");
    }
    EXPECT_TRUE(Eventually([&] { return store.idle().uploads == 0; })) << round;
  }
  EXPECT_TRUE(store.Find("running").ok());
}

TEST(UploadStoreTimeTest, ForgetsResultsWithoutBeingAsked) {
  UploadStore store({kMaxBytes, kMaxBytes, absl::Milliseconds(50)});
  for (int round = 0; round < 2; ++round) {
    Client committed(&store);
    EXPECT_EQ(committed.Send("done", "x"), "");
    EXPECT_EQ(committed.Feed(Commit()), "");
    EXPECT_TRUE(store.Find("done").ok());
    committed.stream->Completion()(adapter::PublishResult());
    EXPECT_TRUE(Eventually([&] { return !store.Find("done").ok(); })) << round;
  }
}

TEST_F(UploadStoreTest, SurvivesStreamsThatTakeOverAndBreakAtRandom) {
  constexpr int kSize = 64;
  std::atomic<int> loads{0}, answers{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 400; ++i) {
        Client client(&store_);
        if (!client.Feed(Begin("u", kSize)).empty()) continue;
        for (int chunk = 0; chunk < (i * 7 + t) % 5 && client.next == Next::kRead; ++chunk) {
          const auto progress = store_.Find("u");
          if (!progress.ok() || progress->received >= kSize) break;
          if (!client.Feed(Chunk(progress->received, "x")).empty()) break;
        }
        if (client.next == Next::kRead && Received("u") == kSize) client.Feed(Commit());
        if (client.next == Next::kLoad) {
          ++loads;
          EXPECT_EQ(client.stream->TakeUpload()->image()->size(), size_t{kSize});
          client.stream->Completion()(Result(1));
        }
        if (client.next == Next::kAnswer) ++answers;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(loads, 1);
  EXPECT_GT(answers, 1);
  EXPECT_EQ(store_.idle().uploads, 0);
}

}  // namespace
}  // namespace dorad::rpc
