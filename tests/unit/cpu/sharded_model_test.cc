#include "tests/unit/cpu/model_fixture.h"

namespace dorad::model {
namespace {

class ShardedTest : public testing::Test {
 protected:
  ShardedTest() {
    Tensors tensors = Checkpoint(Config(), "F32");
    for (auto& [name, tensor] : tensors) {
      const bool second = name == kUp;
      (second ? b_ : a_)[name] = tensor;
      index_[name] = second ? "b.safetensors" : "a.safetensors";
    }
  }

  Loaded Load() {
    folder_.Write("a.safetensors", WriteSafetensors(a_));
    folder_.Write("b.safetensors", WriteSafetensors(b_));
    folder_.Write(kIndex, json{{"metadata", {{"total_size", 1}}}, {"weight_map", index_}});
    return LoadFrom(folder_);
  }

  void ExpectBlamed(const std::string& field) {
    const absl::Status status = Load().status();
    EXPECT_EQ(ReasonOf(status), "MODEL_INDEX_INVALID") << status;
    EXPECT_THAT(ViolationsOf(status), Contains(Blames(field, "MODEL_INDEX_INVALID")));
  }

  ModelFolder folder_;
  Tensors a_, b_;
  json index_;
};

TEST_F(ShardedTest, LoadsWhatTheIndexNames) { EXPECT_TRUE(Load().ok()); }

TEST_F(ShardedTest, RefusesATensorThatTheIndexPutsElsewhere) {
  index_[kNorm] = "b.safetensors";
  ExpectBlamed(kNorm);
}

TEST_F(ShardedTest, RefusesATensorThatTheIndexDoesNotName) {
  index_.erase(kNorm);
  ExpectBlamed(kNorm);
}

TEST_F(ShardedTest, RefusesATensorOfTwoShards) {
  b_[kNorm] = a_[kNorm];
  ExpectBlamed(kNorm);
}

TEST_F(ShardedTest, RefusesAMissingShard) {
  index_[kUp] = "c.safetensors";
  ExpectBlamed("c.safetensors");
}

TEST_F(ShardedTest, RefusesShardNamesThatLeaveTheFolder) {
  for (const char* name : {"../a.safetensors", "/tmp/a.safetensors", "x\\a.safetensors",
                           "..safetensors", "", "a.bin"}) {
    index_[kUp] = name;
    ExpectBlamed(std::string(kIndex) + ":weight_map." + kUp);
  }
}

TEST_F(ShardedTest, RefusesAnIndexWithoutAMap) {
  index_ = json::array();
  ExpectBlamed(std::string(kIndex) + ":weight_map");
}

}  // namespace
}  // namespace dorad::model
