#include "server/app/cli.h"

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

// The message of a refusal.
std::string Refusal(const std::vector<std::string>& arguments) {
  const absl::Status status = ParseCommandLine(arguments).status();
  EXPECT_EQ(ReasonOf(status), "USAGE") << status;
  return std::string(status.message());
}

TEST(CliTest, TakesFlagsAsTwoWordsOrAsOne) {
  const auto command =
      ParseCommandLine({"serve", "--model", "/m", "--config=/c.yaml", "--set", "a.b=1",
                        "--set=c.d=x=y", "--adapter", "one=/1", "--adapter=two=/a=b"});
  ASSERT_TRUE(command.ok()) << command.status();
  EXPECT_EQ(command->verb, Command::Verb::kServe);
  EXPECT_EQ(command->model, "/m");
  EXPECT_EQ(command->config_file, "/c.yaml");
  EXPECT_THAT(command->overrides, ElementsAre("a.b=1", "c.d=x=y"));
  EXPECT_THAT(command->adapters, ElementsAre(Pair("one", "/1"), Pair("two", "/a=b")));
}

TEST(CliTest, TheLastModelAndFileCount) {
  const auto command =
      ParseCommandLine({"print-config", "--model=/a", "--model=/b", "--config=/a", "--config=/b"});
  ASSERT_TRUE(command.ok()) << command.status();
  EXPECT_EQ(command->verb, Command::Verb::kPrintConfig);
  EXPECT_EQ(command->model, "/b");
  EXPECT_EQ(command->config_file, "/b");
  EXPECT_THAT(command->overrides, IsEmpty());
}

TEST(CliTest, ChecksOneFileOrModel) {
  const auto command = ParseCommandLine({"check-config", "--set", "a.b=1", "/c.yaml"});
  ASSERT_TRUE(command.ok()) << command.status();
  EXPECT_EQ(command->verb, Command::Verb::kCheckConfig);
  EXPECT_EQ(command->path, "/c.yaml");
  EXPECT_THAT(command->overrides, ElementsAre("a.b=1"));
  EXPECT_THAT(Refusal({"check-config", "a", "b"}), HasSubstr("a second argument, \"b\""));
}

TEST(CliTest, ChecksOneAdapter) {
  const auto command = ParseCommandLine({"check-adapter", "/a", "--model", "/m", "--set", "a.b=1"});
  ASSERT_TRUE(command.ok()) << command.status();
  EXPECT_EQ(command->verb, Command::Verb::kCheckAdapter);
  EXPECT_EQ(command->path, "/a");
  EXPECT_EQ(command->model, "/m");
  EXPECT_THAT(Refusal({"check-adapter", "--model", "/m"}), HasSubstr("needs the adapter's folder"));
  EXPECT_THAT(Refusal({"check-adapter", "/a", "/b"}), HasSubstr("a second argument, \"/b\""));
  EXPECT_THAT(Refusal({"check-adapter", "/a", "--adapter", "a=/a"}),
              HasSubstr("without --adapter"));
}

TEST(CliTest, ChecksWhatServeWouldTake) {
  const auto command = ParseCommandLine(
      {"check-config", "--config", "/c.yaml", "--model", "/m", "--adapter", "one=/1"});
  ASSERT_TRUE(command.ok()) << command.status();
  EXPECT_EQ(command->config_file, "/c.yaml");
  EXPECT_EQ(command->model, "/m");
  EXPECT_THAT(command->adapters, ElementsAre(Pair("one", "/1")));
  EXPECT_TRUE(ParseCommandLine({"check-config", "--model", "/m"}).ok()) << "without a file";
  EXPECT_THAT(Refusal({"check-config"}), HasSubstr("needs a FILE, a MODEL or flags"));
}

TEST(CliTest, TheModelNeedsNoFlag) {
  const auto command = ParseCommandLine({"serve", "/m", "--set", "a.b=1"});
  ASSERT_TRUE(command.ok()) << command.status();
  EXPECT_EQ(command->model, "/m");
  EXPECT_THAT(Refusal({"serve", "/m", "/n"}), HasSubstr("a second model, \"/n\""));
}

TEST(CliTest, SuggestsTheNearestName) {
  EXPECT_THAT(Refusal({"serve", "--modle", "/m"}), HasSubstr("did you mean --model?"));
  EXPECT_THAT(Refusal({"sevre"}), HasSubstr("did you mean serve?"));
}

TEST(CliTest, KnowsHelpAndVersion) {
  using Arguments = std::vector<std::string>;
  for (const Arguments& arguments :
       {Arguments{"--help"}, Arguments{"-h"}, Arguments{"help"}, Arguments{"serve", "--help"},
        Arguments{"check-config", "--help"}}) {
    const auto command = ParseCommandLine(arguments);
    ASSERT_TRUE(command.ok()) << command.status();
    EXPECT_EQ(command->verb, Command::Verb::kHelp);
  }
  EXPECT_EQ(ParseCommandLine({"--version"})->verb, Command::Verb::kVersion);
}

TEST(CliTest, SaysWhatIsWrongAndWhereHelpIs) {
  EXPECT_THAT(Refusal({}), HasSubstr("a command is missing"));
  EXPECT_THAT(Refusal({"run"}), HasSubstr("unknown command \"run\""));
  EXPECT_THAT(Refusal({"serve", "--port", "1"}), HasSubstr("unknown argument \"--port\""));
  EXPECT_THAT(Refusal({"serve", "--help=1"}), HasSubstr("unknown argument \"--help\""));
  EXPECT_THAT(Refusal({"serve", "--model"}), HasSubstr("--model needs a value"));
  EXPECT_THAT(Refusal({"serve", "--model="}), HasSubstr("--model needs a value"));
  EXPECT_THAT(Refusal({"serve", "--set", ""}), HasSubstr("--set needs a value"));
  for (const char* adapter : {"a", "=/a", "a="}) {
    EXPECT_THAT(Refusal({"serve", "--adapter", adapter}), HasSubstr("takes name=DIR"));
  }
  EXPECT_THAT(Refusal({"run"}), HasSubstr("dorad --help"));
}

TEST(CliTest, HelpNamesEveryExitCode) {
  for (const int code : {kExitOk, kExitUsage, kExitSoftware, kExitUnresponsive, kExitConfig}) {
    EXPECT_THAT(HelpText(), HasSubstr(std::to_string(code)));
  }
}

}  // namespace
}  // namespace dorad
