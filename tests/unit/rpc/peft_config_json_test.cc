#include "server/rpc/peft_config_json.h"

#include "server/adapter/peft/peft_config.h"
#include "tests/unit/support/test.h"

namespace dorad::rpc {
namespace {

constexpr int kMaxRank = 64;

v1::PeftConfig Minimal() {
  v1::PeftConfig config;
  config.set_r(8);
  config.set_lora_alpha(16.5);
  config.mutable_target_modules()->mutable_list()->add_names("q_proj");
  return config;
}

absl::StatusOr<adapter::PeftConfig> Parse(const v1::PeftConfig& config) {
  adapter::Violations violations;
  auto parsed = adapter::ParsePeftConfig(ToAdapterConfigJson(config), kMaxRank, violations);
  DORAD_RETURN_IF_ERROR(violations.ToStatus("adapter"));
  return *std::move(parsed);
}

// The refused fields in the message's terms.
std::vector<std::string> Refused(const v1::PeftConfig& config) {
  std::vector<std::string> fields;
  for (const Violation& v : ViolationsOf(NamePeftConfigFields(Parse(config).status()))) {
    fields.push_back(v.field);
  }
  return fields;
}

TEST(PeftConfigJsonTest, SaysTheSameAsTheFields) {
  v1::PeftConfig config = Minimal();
  config.set_use_dora(true);
  config.set_use_rslora(true);
  config.mutable_target_modules()->mutable_list()->add_names("say \"v\"\n\xc3\xa4");
  config.mutable_exclude_modules()->set_regex(R"(.*\.0\..*)");
  for (const char* pattern : {"z", "a", R"(\d)"}) {
    v1::RankPattern* rank = config.add_rank_pattern();
    rank->set_pattern(pattern);
    rank->set_rank(pattern[0] == 'a' ? 2 : 3);
  }
  v1::AlphaPattern* alpha = config.add_alpha_pattern();
  alpha->set_pattern("q_proj");
  alpha->set_alpha(0.1);
  config.add_layers_to_transform(0);
  config.add_layers_to_transform(5);
  config.add_layers_pattern("layers");
  const auto parsed = Parse(config);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->rank, 8);
  EXPECT_EQ(parsed->alpha, 16.5);
  EXPECT_TRUE(parsed->use_dora);
  EXPECT_TRUE(parsed->use_rslora);
  EXPECT_THAT(parsed->targets.names, ElementsAre("q_proj", "say \"v\"\n\xc3\xa4"));
  EXPECT_EQ(parsed->exclude.regex, R"(.*\.0\..*)");
  // The first that fits counts: the order is the message's.
  EXPECT_THAT(parsed->rank_pattern, ElementsAre(Pair("z", 3), Pair("a", 2), Pair(R"(\d)", 3)));
  EXPECT_THAT(parsed->alpha_pattern, ElementsAre(Pair("q_proj", 0.1)));
  EXPECT_THAT(*parsed->layers, ElementsAre(0, 5));
  EXPECT_THAT(parsed->layers_pattern, ElementsAre("layers"));
}

TEST(PeftConfigJsonTest, LeavesOutWhatIsNotSet) {
  const auto parsed = Parse(Minimal());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_FALSE(parsed->use_dora);
  EXPECT_FALSE(parsed->layers.has_value());
  EXPECT_EQ(parsed->exclude.kind, adapter::ModuleSelector::Kind::kNone);
}

TEST(PeftConfigJsonTest, TakesAllLinear) {
  v1::PeftConfig config = Minimal();
  config.mutable_target_modules()->set_regex("all-linear");
  EXPECT_EQ(Parse(config)->targets.kind, adapter::ModuleSelector::Kind::kAllLinear);
}

TEST(PeftConfigJsonTest, RefusalsNameTheFieldsOfTheMessage) {
  EXPECT_THAT(Refused(v1::PeftConfig()),
              UnorderedElementsAre("peft_config.r", "peft_config.lora_alpha",
                                   "peft_config.target_modules"));
  v1::PeftConfig config = Minimal();
  config.set_r(0);
  config.set_lora_alpha(std::numeric_limits<double>::quiet_NaN());
  config.mutable_target_modules()->clear_selector();
  v1::RankPattern* rank = config.add_rank_pattern();
  rank->set_pattern("k_proj");
  rank->set_rank(kMaxRank + 1);
  EXPECT_THAT(Refused(config), UnorderedElementsAre("peft_config.r", "peft_config.lora_alpha",
                                                    "peft_config.target_modules",
                                                    "peft_config.rank_pattern.k_proj"));
}

TEST(PeftConfigJsonTest, APatternThatOccursTwiceIsRefused) {
  v1::PeftConfig config = Minimal();
  for (int rank : {2, 3}) {
    v1::RankPattern* entry = config.add_rank_pattern();
    entry->set_pattern("q_proj");
    entry->set_rank(rank);
  }
  EXPECT_EQ(ReasonOf(Parse(config).status()), "ADAPTER_CONFIG_DUPLICATE_KEY");
  EXPECT_THAT(Refused(config), ElementsAre("peft_config"));
}

TEST(PeftConfigJsonTest, LeavesOtherRefusalsAlone) {
  const absl::Status tensors = MakeInvalid("adapter", {{"x.lora_A", "ADAPTER_NOT_FINITE", "NaN"}});
  EXPECT_EQ(NamePeftConfigFields(tensors), tensors);
  const absl::Status busy = WithRetryAfter(
      MakeError(absl::StatusCode::kResourceExhausted, "LOAD_QUEUE_FULL", "full"), absl::Seconds(1));
  EXPECT_TRUE(RetryAfterOf(NamePeftConfigFields(busy)).has_value());
}

}  // namespace
}  // namespace dorad::rpc
