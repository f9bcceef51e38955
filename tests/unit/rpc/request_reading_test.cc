#include "server/rpc/request_reading.h"

#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/util/message_differencer.h>

#include "dorad/v1/adapters.pb.h"
#include "dorad/v1/inference.pb.h"
#include "tests/unit/support/test.h"

namespace dorad::rpc {
namespace {

using google::protobuf::util::MessageDifferencer;

// In slices of a few bytes, as the network brings them.
grpc::ByteBuffer Buffer(const std::string& bytes, size_t slice = 7) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += slice) {
    slices.emplace_back(bytes.substr(at, slice));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

absl::Status Parse(const std::string& bytes, google::protobuf::Message* request,
                   int64_t max_bytes = 1 << 20) {
  grpc::ByteBuffer buffer = Buffer(bytes, 4096);
  return ParseRequest(&buffer, max_bytes, request);
}

v1::PublishRequest Begin() {
  v1::PublishRequest request;
  v1::PublishBegin* begin = request.mutable_begin();
  begin->set_name("a");
  (*begin->mutable_tags())["k"] = "v";
  begin->mutable_peft_config()->set_r(8);
  begin->mutable_peft_config()->add_rank_pattern()->set_pattern("q_proj");
  begin->mutable_peft_config()->mutable_target_modules()->mutable_list()->add_names("q_proj");
  begin->set_safetensors_size(1 << 30);
  return request;
}

TEST(RequestReadingTest, KeepsMessagesAsTheyAreHoweverTheyAreSliced) {
  const v1::PublishRequest request = Begin();
  for (const size_t slice : {1, 2, 7, 4096}) {
    grpc::ByteBuffer buffer = Buffer(request.SerializeAsString(), slice);
    v1::PublishRequest read;
    ASSERT_TRUE(ParseRequest(&buffer, 1 << 20, &read).ok());
    EXPECT_TRUE(MessageDifferencer::Equals(read, request));
  }
  v1::AbortRequest empty;
  EXPECT_TRUE(Parse("", &empty).ok());
}

TEST(RequestReadingTest, RefusesMoreBytesThanTheMethodTakes) {
  v1::ScoreRequest request;
  EXPECT_EQ(ReasonOf(Parse(std::string(101, '\0'), &request, 100)), "REQUEST_TOO_LARGE");
}

TEST(RequestReadingTest, CountsFieldsAtAllDepths) {
  v1::AbortRequest ids;
  for (int i = 0; i < kMaxRequestFields; ++i) ids.mutable_requests()->add_request_ids();
  v1::AbortRequest read;
  EXPECT_EQ(ReasonOf(Parse(ids.SerializeAsString(), &read, INT64_MAX)), "REQUEST_TOO_LARGE");
  // The message around them is one, too.
  ids.mutable_requests()->mutable_request_ids()->RemoveLast();
  EXPECT_TRUE(Parse(ids.SerializeAsString(), &read, INT64_MAX).ok());
}

TEST(RequestReadingTest, CountsUnknownFieldsAndRefusesGroups) {
  v1::AbortRequest read;
  std::string unknown;
  for (int i = 0; i <= kMaxRequestFields; ++i) unknown += "\x78\x01";  // number 15, a varint
  EXPECT_EQ(ReasonOf(Parse(unknown, &read, INT64_MAX)), "REQUEST_TOO_LARGE");
  EXPECT_EQ(ReasonOf(Parse("\x7b\x7c", &read)), "REQUEST_MALFORMED");
}

TEST(RequestReadingTest, TakesNothingThatProtobufDoesNotAndRefusesNoneOfOurs) {
  google::protobuf::SetLogHandler(nullptr);  // of texts that are none it would tell each time
  std::mt19937 random(7);
  const std::string good = Begin().SerializeAsString();
  for (int i = 0; i < 20'000; ++i) {
    std::string bytes = good.substr(0, random() % (good.size() + 1));
    for (int changes = static_cast<int>(random() % 3); changes > 0 && !bytes.empty(); --changes) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    v1::PublishRequest ours, theirs;
    const absl::Status status = Parse(bytes, &ours);
    const bool parses = theirs.ParseFromString(bytes);
    if (status.ok()) {
      ASSERT_TRUE(parses);
      ASSERT_TRUE(MessageDifferencer::Equals(ours, theirs));
    } else {
      ASSERT_EQ(ReasonOf(status), "REQUEST_MALFORMED");
    }
    if (bytes == good) {
      ASSERT_TRUE(status.ok());
    }
  }
}

}  // namespace
}  // namespace dorad::rpc
