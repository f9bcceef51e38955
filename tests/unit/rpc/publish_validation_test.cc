#include "server/rpc/publish_validation.h"

#include "tests/unit/support/test.h"

namespace dorad::rpc {
namespace {

template <typename Wire>
class PublishValidationTest : public testing::Test {};

using Wires =
    testing::Types<v1::PublishBegin, v1::PublishFromPathRequest, v1::PublishFromMemoryRequest>;
TYPED_TEST_SUITE(PublishValidationTest, Wires);

TYPED_TEST(PublishValidationTest, ReadsEveryOption) {
  TypeParam wire;
  wire.set_name("a");
  wire.set_version(7);
  wire.set_activate(true);
  wire.set_expected_generation(0);
  wire.set_durable(true);
  wire.set_pinned(true);
  wire.set_keep_last(3);
  (*wire.mutable_tags())["k"] = "v";
  std::vector<Violation> violations;
  const adapter::PublishOptions options = ParsePublishOptions(wire, &violations);
  EXPECT_TRUE(violations.empty());
  EXPECT_EQ(options.name, "a");
  EXPECT_EQ(options.version, 7);
  EXPECT_TRUE(options.activate);
  EXPECT_EQ(options.expected_generation, 0);
  EXPECT_TRUE(options.durable);
  EXPECT_TRUE(options.pinned);
  EXPECT_EQ(options.keep_last, 3);
  EXPECT_THAT(options.tags, ElementsAre(Pair("k", "v")));
}

TYPED_TEST(PublishValidationTest, LeavesOutWhatIsNotGiven) {
  TypeParam wire;
  wire.set_name("a");
  std::vector<Violation> violations;
  const adapter::PublishOptions options = ParsePublishOptions(wire, &violations);
  EXPECT_TRUE(violations.empty());
  EXPECT_FALSE(options.version || options.expected_generation || options.keep_last);
  EXPECT_FALSE(options.activate || options.durable || options.pinned);
  EXPECT_TRUE(options.tags.empty());
}

TYPED_TEST(PublishValidationTest, ListsEveryViolation) {
  TypeParam wire;
  wire.set_name("/");
  wire.set_version(0);
  (*wire.mutable_tags())[""] = "v";
  std::vector<Violation> violations;
  ParsePublishOptions(wire, &violations);
  std::vector<std::string> reasons;
  for (const Violation& violation : violations) reasons.push_back(violation.reason);
  EXPECT_THAT(reasons,
              ElementsAre("ADAPTER_NAME_INVALID", "ADAPTER_VERSION_INVALID", "TAGS_INVALID"));
}

}  // namespace
}  // namespace dorad::rpc
