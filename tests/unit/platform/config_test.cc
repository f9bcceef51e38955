#include "server/platform/config/config.h"

#include "server/platform/config/config_schema.h"
#include "server/platform/config/config_value.h"
#include "server/platform/files/file.h"
#include "tests/unit/support/test.h"

namespace dorad {
namespace {

Config Parse(const std::string& text, const std::vector<std::string>& overrides = {}) {
  const absl::StatusOr<Config> config = ParseConfig(text, "test.yaml", overrides);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : Config();
}

absl::Status Fail(const std::string& text, const std::vector<std::string>& overrides = {}) {
  return ParseConfig(text, "test.yaml", overrides).status();
}

TEST(ConfigTest, TakesDefaultsFileAndOverridesInThisOrder) {
  EXPECT_EQ(Parse("").engine.max_step_tokens, 0);
  const std::string file = "engine: {max_step_tokens: 64, prefix_cache: false}\nlimits:\n";
  EXPECT_EQ(Parse(file).engine.max_step_tokens, 64);
  EXPECT_FALSE(Parse(file).engine.prefix_cache);
  EXPECT_EQ(Parse(file, {"engine.max_step_tokens=32"}).engine.max_step_tokens, 32);
  EXPECT_EQ(
      Parse("", {"engine.max_step_tokens=1", "engine.max_step_tokens=2"}).engine.max_step_tokens,
      2);
}

TEST(ConfigTest, ReadsEveryType) {
  const Config config = Parse(R"(
server: {grpc_listen: "unix:/run/dorad.sock", metrics_listen: "", admin_listen: "[::1]:0",
         drain_timeout_seconds: 1.5}
engine: {kv_bytes: 512MiB, deterministic: false}
adapters:
  preload: {b: /x, "a": '/y z'}
  allowed_roots: [/a, "/b"]
log: {level: debug}
)");
  EXPECT_EQ(config.server.grpc_listen, "unix:/run/dorad.sock");
  EXPECT_EQ(config.server.metrics_listen, "");
  EXPECT_EQ(config.server.admin_listen, "[::1]:0");
  EXPECT_EQ(config.server.drain_timeout_seconds, 1.5);
  EXPECT_EQ(config.engine.kv_bytes, 512 << 20);
  EXPECT_FALSE(config.engine.deterministic);
  EXPECT_THAT(config.adapters.preload, ElementsAre(Pair("b", "/x"), Pair("a", "/y z")));
  EXPECT_THAT(config.adapters.allowed_roots, ElementsAre("/a", "/b"));
  EXPECT_EQ(config.log.level, "debug");
}

TEST(ConfigTest, OverridesEveryType) {
  const Config config = Parse(
      "adapters: {preload: {a: /old, keep: /k}}",
      {"server.metrics_listen=", "model.path=/m=1 # not a comment", "engine.kv_bytes=2 GiB",
       "engine.watchdog_seconds=7.5", "engine.prefix_cache=false",
       "adapters.allowed_roots=[/r, /s]", "adapters.preload.a=/new", "adapters.preload.v1.5=/v"});
  EXPECT_EQ(config.server.metrics_listen, "");
  EXPECT_EQ(config.model.path, "/m=1 # not a comment");
  EXPECT_EQ(config.engine.kv_bytes, int64_t{2} << 30);
  EXPECT_EQ(config.engine.watchdog_seconds, 7.5);
  EXPECT_FALSE(config.engine.prefix_cache);
  EXPECT_THAT(config.adapters.allowed_roots, ElementsAre("/r", "/s"));
  EXPECT_THAT(config.adapters.preload,
              ElementsAre(Pair("a", "/new"), Pair("keep", "/k"), Pair("v1.5", "/v")));
  EXPECT_THAT(Parse("", {"adapters.preload={x: /y}"}).adapters.preload,
              ElementsAre(Pair("x", "/y")));
}

struct Bad {
  const char* what;
  std::string file;
  std::vector<std::string> overrides;
  const char* reason;
  const char* in_message;
};

void PrintTo(const Bad& bad, std::ostream* out) { *out << bad.what; }

std::vector<Bad> BadFiles() {
  const char* syntax = "CONFIG_SYNTAX";
  const char* unknown = "CONFIG_UNKNOWN_KEY";
  const char* value = "CONFIG_INVALID_VALUE";
  const char* twice = "CONFIG_DUPLICATE_KEY";
  return {
      {"not YAML", "engine: {threads: 1\n\nmodel: [", {}, syntax, "test.yaml:3"},
      {"a tab", "engine:\n\tthreads: 1", {}, syntax, "test.yaml:2"},
      {"a list", "- engine", {}, syntax, "test.yaml:1: expected a map of sections"},
      {"a text", "engine", {}, syntax, "expected a map of sections"},
      {"two documents", "log:\n---\nlog:\n", {}, syntax, "test.yaml:2: a second document"},
      {"stray comma", ",t==:=1.\n", {}, syntax, "test.yaml:1: a second document"},
      {"text after the document", "log: {level: info}\n]", {}, syntax, "test.yaml:2"},
      {"second document after an empty one", "---\n---\nlog:\n", {}, syntax, "test.yaml:2"},
      {"deep nesting", "log: " + std::string(5000, '['), {}, syntax, "test.yaml"},
      {"unknown alias", "log: *x", {}, syntax, "test.yaml:1"},
      {"misspelt key",
       "log:\n  level: info\nengine:\n  thread: 3",
       {},
       unknown,
       "test.yaml:4: engine.thread: unknown key; did you mean engine.threads?"},
      {"key of another section",
       "engine:\n  max_tokens: 3",
       {},
       unknown,
       "did you mean limits.max_tokens?"},
      {"nothing near",
       "engine:\n  wibbledywobble: 3",
       {},
       unknown,
       "engine.wibbledywobble: unknown key"},
      {"misspelt section",
       "sever:\n  grpc_listen: x",
       {},
       unknown,
       "test.yaml:1: sever: unknown section; did you mean server?"},
      {"key outside of its section",
       "max_queued_tokens: 3",
       {},
       unknown,
       "did you mean limits.max_queued_tokens?"},
      {"merge key", "log: {<<: {level: info}}", {}, unknown, "log.<<"},
      {"a key that is a list", "log: {[a]: b}", {}, unknown, "a key that is not text"},
      {"key twice", "log:\n  level: info\n  level: error", {}, twice, "test.yaml:3: log.level"},
      {"section twice", "log: {level: info}\nlog: {format: text}", {}, twice, "test.yaml:2: log"},
      {"name twice", "adapters: {preload: {a: /x, a: /y}}", {}, value, "'a' occurs twice"},
      {"section is a list", "log: [level]", {}, value, "test.yaml:1: log: expected a map"},
      {"value is a map", "log: {level: {a: b}}", {}, value, "not a map"},
      {"value is a list", "log: {level: [info]}", {}, value, "not a list"},
      {"value is missing", "log:\n  level:", {}, value, "value is missing"},
      {"list expected", "adapters: {allowed_roots: /a}", {}, value, "list of absolute paths"},
      {"list of lists", "adapters: {allowed_roots: [[/a]]}", {}, value, "list of absolute paths"},
      {"map expected", "adapters: {preload: [a]}", {}, value, "map of name"},
      {"map of maps", "adapters: {preload: {a: {b: c}}}", {}, value, "map of name"},
  };
}

std::vector<Bad> BadValues() {
  const char* value = "CONFIG_INVALID_VALUE";
  const char* unknown = "CONFIG_UNKNOWN_KEY";
  const char* syntax = "CONFIG_SYNTAX";
  return {
      {"text for a number", "", {"engine.threads=two"}, value, "'two' is not valid; expected int"},
      {"fraction", "", {"engine.threads=1.5"}, value, "integer, 0 to 4096"},
      {"exponent", "", {"engine.threads=1e1"}, value, "integer"},
      {"hexadecimal", "", {"engine.threads=0x10"}, value, "integer"},
      {"blank", "", {"engine.threads= 1"}, value, "integer"},
      {"nothing", "", {"engine.threads="}, value, "integer"},
      {"below the range", "", {"engine.threads=-1"}, value, "0 to 4096"},
      {"above the range", "", {"limits.max_n=1000000"}, value, "1 to 65536"},
      {"beyond int64", "", {"limits.max_score_tokens=9223372036854775808"}, value, "integer"},
      {"decimal unit", "", {"engine.kv_bytes=512MB"}, value, "512MiB"},
      {"fraction of a unit", "", {"engine.kv_bytes=1.5GiB"}, value, "bytes"},
      {"unit alone", "", {"engine.kv_bytes=GiB"}, value, "bytes"},
      {"two units", "", {"engine.kv_bytes=1MiBKiB"}, value, "bytes"},
      {"bytes overflow", "", {"engine.kv_bytes=9223372036854775807TiB"}, value, "bytes"},
      {"unit of a count", "", {"limits.max_n=1KiB"}, value, "integer"},
      {"no bytes", "", {"memory.vram_limit=0"}, value, "bytes"},
      {"a share of nothing", "", {"memory.vram_limit=0.0"}, value, "a share above 0.0"},
      {"a share of more than all", "", {"memory.vram_limit=1.01"}, value, "up to 1.0"},
      {"a share that is no number", "", {"memory.vram_limit=.x"}, value, "a share"},
      {"a share with a unit", "", {"memory.vram_limit=0.5GiB"}, value, "a share"},
      {"not a number of seconds", "", {"server.drain_timeout_seconds=30s"}, value, "seconds"},
      {"NaN seconds", "", {"server.drain_timeout_seconds=nan"}, value, "seconds, 0 to 86400"},
      {"endless seconds", "", {"server.drain_timeout_seconds=inf"}, value, "seconds"},
      {"negative seconds", "", {"server.drain_timeout_seconds=-1"}, value, "seconds"},
      {"yes for true", "", {"engine.prefix_cache=yes"}, value, "true or false"},
      {"1 for true", "", {"engine.prefix_cache=1"}, value, "true or false"},
      {"unknown choice", "", {"model.compute_dtype=fp16"}, value, "one of auto, fp32, bf16"},
      {"unknown device", "", {"model.device=tpu"}, value, "one of auto, cpu, cuda"},
      {"unknown kernels", "", {"engine.instruction_set=sm80"}, value, "one of auto, sm90, mma"},
      {"unknown level", "", {"log.level=INFO"}, value, "debug, info, warning, error"},
      {"no port", "", {"server.grpc_listen=localhost"}, value, "expected host:port"},
      {"port too large", "", {"server.grpc_listen=a:65536"}, value, "0 to 65535"},
      {"port with a sign", "", {"server.grpc_listen=a:+1"}, value, "0 to 65535"},
      {"bare IPv6", "", {"server.grpc_listen=::1:50051"}, value, "brackets"},
      {"no host", "", {"server.grpc_listen=:50051"}, value, "host is missing"},
      {"URL", "", {"server.metrics_listen=http://a:1"}, value, "brackets"},
      {"empty where needed", "", {"server.grpc_listen="}, value, "expected host:port"},
      {"metrics on a socket file", "", {"server.metrics_listen=unix:/x"}, value, "host:port or"},
      {"relative root", "", {"adapters.allowed_roots=[a]"}, value, "'a' is not an absolute path"},
      {"text after a list", "", {"adapters.allowed_roots=[/a]]"}, value, "not YAML"},
      {"list that is no YAML", "", {"adapters.allowed_roots=[a"}, value, "not YAML"},
      {"folder missing", "", {"adapters.preload.a="}, value, "folder of 'a' is missing"},
      {"name missing", "", {"adapters.preload.=/x"}, value, "name is missing"},
      {"not UTF-8", "", {"model.path=\xff"}, value, "not UTF-8"},
      {"NUL", "", {std::string("model.path=a\0b", 14)}, value, "NUL"},
      {"no equals sign", "", {"engine.threads"}, syntax, "--set engine.threads: expected section"},
      {"no section", "", {"threads=1"}, syntax, "expected section.key=value"},
      {"unknown in --set", "", {"engine.treads=1"}, unknown, "did you mean engine.threads?"},
      {"no map", "", {"engine.threads.x=1"}, unknown, "--set engine.threads.x"},
  };
}

class BadConfigTest : public ::testing::TestWithParam<Bad> {};

TEST_P(BadConfigTest, IsRefusedWithReasonAndPlace) {
  const absl::Status status = Fail(GetParam().file, GetParam().overrides);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), GetParam().reason) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().in_message));
}

INSTANTIATE_TEST_SUITE_P(Files, BadConfigTest, ::testing::ValuesIn(BadFiles()));
INSTANTIATE_TEST_SUITE_P(Values, BadConfigTest, ::testing::ValuesIn(BadValues()));

TEST(ConfigTest, ReportsEveryProblemAtOnce) {
  const absl::Status status =
      Fail("engine:\n  threds: 1\n  threads: x\nwhat: 1\n", {"log.level=loud", "nonsense"});
  std::vector<std::string> fields;
  for (const Violation& violation : ViolationsOf(status)) fields.push_back(violation.field);
  EXPECT_THAT(fields, ElementsAre("test.yaml:2: engine.threds", "test.yaml:3: engine.threads",
                                  "test.yaml:4: what", "--set log.level", "--set nonsense"));
}

TEST(ConfigTest, BoundsTheReport) {
  std::string file = "engine:\n";
  for (int i = 0; i < 1000; ++i) absl::StrAppend(&file, "  key", i, ": 1\n");
  const absl::Status status = Fail(file);
  EXPECT_EQ(ViolationsOf(status).size(), 64u);
  EXPECT_EQ(OmittedViolationsOf(status), 36u) << "reading ends after 100";
}

TEST(ConfigTest, AcceptsTheEndsOfEveryRange) {
  for (const ConfigKey& key : ConfigKeys()) {
    if (key.max == 0) continue;
    for (const double value : {key.min, key.max}) {
      const bool decimal = key.type == ConfigType::kSeconds || key.type == ConfigType::kShare;
      const std::string text =
          decimal ? FormatDecimal(value) : absl::StrCat(static_cast<int64_t>(value));
      Config config;
      EXPECT_EQ(SetFromText(key, text, &config), "") << key.path();
    }
    if (key.type == ConfigType::kSeconds) continue;
    for (const double value : {key.min - 1, key.max + 1}) {
      Config config;
      EXPECT_NE(SetFromText(key, absl::StrCat(static_cast<int64_t>(value)), &config), "")
          << key.path();
    }
  }
}

TEST(ConfigTest, AutoIsAValueOfSomeNumbers) {
  const Config config = Parse("engine: {kv_bytes: 1GiB, max_step_tokens: auto}",
                              {"engine.kv_bytes=auto", "server.max_concurrent_streams=7"});
  EXPECT_EQ(config.engine.kv_bytes, 0);
  EXPECT_EQ(config.engine.max_step_tokens, 0);
  EXPECT_THAT(ToYaml(config), HasSubstr("kv_bytes: auto"));
  for (const ConfigKey& key : ConfigKeys()) {
    Config changed;
    const bool number = key.type == ConfigType::kInteger || key.type == ConfigType::kBytes;
    if (number) {
      EXPECT_EQ(SetFromText(key, "auto", &changed).empty(), key.may_be_auto) << key.path();
    }
    if (key.may_be_auto) {
      EXPECT_NE(SetFromText(key, "0", &changed), "") << key.path();
    }
  }
}

TEST(ConfigTest, ALimitIsBytesOrAShare) {
  EXPECT_EQ(ByteLimit(Parse("memory: {vram_limit: 40GiB}").memory.vram_limit, 1000),
            int64_t{40} << 30);
  EXPECT_EQ(ByteLimit(Parse("memory: {vram_limit: 1}").memory.vram_limit, 1000), 1);
  EXPECT_EQ(ByteLimit(Parse("memory: {vram_limit: 1.0}").memory.vram_limit, 1000), 1000);
  EXPECT_EQ(ByteLimit(Parse("memory: {vram_limit: .25}").memory.vram_limit, 1000), 250);
  EXPECT_EQ(ByteLimit(Config().memory.vram_limit, 1000), 950);
}

TEST(ConfigTest, YamlReadsBackToTheSameValues) {
  Config config;
  config.model.path = "a: \"b\" \\ #c\n\t\x01 \xc3\xa9 \xc2\x85 \xe2\x80\xa8 - [x] 'y' !z &w *v %";
  config.server.metrics_listen = "";
  config.engine.kv_bytes = 1025;
  config.adapters.max_bytes = int64_t{3} << 40;
  config.engine.watchdog_seconds = 5.1;
  config.engine.prefix_cache = false;
  config.adapters.preload = {{"true", "/null"}, {"1.5", "/~"}, {"z: y", "- /x"}};
  config.adapters.allowed_roots = {"/a, b", "/]", "/\""};
  const std::string yaml = ToYaml(config);
  const Config read = Parse(yaml);
  EXPECT_EQ(ToYaml(read), yaml);
  EXPECT_EQ(read.model.path, config.model.path);
  EXPECT_EQ(read.engine.kv_bytes, 1025);
  EXPECT_EQ(read.adapters.max_bytes, int64_t{3} << 40);
  EXPECT_EQ(read.engine.watchdog_seconds, 5.1);
  EXPECT_FALSE(read.engine.prefix_cache);
  EXPECT_EQ(read.adapters.preload, config.adapters.preload);
  EXPECT_EQ(read.adapters.allowed_roots, config.adapters.allowed_roots);
}

TEST(ConfigTest, DefaultsAreValid) {
  const Config config;
  EXPECT_EQ(ToYaml(Parse(ToYaml(config))), ToYaml(config));
}

TEST(ConfigTest, SaysWhereEachValueComesFrom) {
  ConfigOrigins origins;
  const std::string text =
      "engine:\n  threads: 3\n  kv_bytes: 1GiB\nadapters:\n  preload:\n    a: /a\n";
  const absl::StatusOr<Config> config =
      ParseConfig(text, "c.yaml", {"engine.kv_bytes=2GiB", "log.level=error"}, &origins);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(origins,
              ElementsAre(Pair("adapters.preload", "c.yaml:5"), Pair("engine.kv_bytes", "--set"),
                          Pair("engine.threads", "c.yaml:2"), Pair("log.level", "--set")));
  const std::string yaml = ToYaml(*config, &origins);
  EXPECT_THAT(yaml, HasSubstr("  threads: 3  # c.yaml:2\n"));
  EXPECT_THAT(yaml, HasSubstr("  preload:  # c.yaml:5\n"));
  EXPECT_THAT(yaml, HasSubstr("  max_n: 128  # default\n"));
  EXPECT_EQ(ToYaml(Parse(yaml)), ToYaml(*config)) << "comments must not change what is read";
  ASSERT_TRUE(ParseConfig("", "", {"adapters.preload.a=/x"}, &origins).ok());
  EXPECT_THAT(origins, ElementsAre(Pair("adapters.preload", "--set")));
}

TEST(ConfigTest, LoadsAFileAndSaysWhenThereIsNone) {
  const std::string path = ::testing::TempDir() + "/base_config_test.yaml";
  std::ofstream(path) << "engine:\n  threads: 3\n";
  const absl::StatusOr<Config> config = LoadConfig(path, {"log.level=error"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->engine.threads, 3);
  EXPECT_EQ(config->log.level, "error");
  EXPECT_TRUE(LoadConfig("", {}).ok());
  EXPECT_EQ(ReasonOf(LoadConfig("/no/such.yaml", {}).status()), "FILE_NOT_FOUND");
  std::ofstream(path) << std::string((1 << 20) + 1, '#');
  EXPECT_EQ(ReasonOf(LoadConfig(path, {}).status()), "FILE_TOO_LARGE");
}

// Any member of Config without a row in the table would be lost on the way through YAML.
TEST(ConfigTest, TableCoversEveryMember) {
  size_t bytes = 0;
  Config config;
  std::set<const void*> places;
  for (const ConfigKey& key : ConfigKeys()) {
    std::visit(
        [&](auto* field) {
          places.insert(field);
          bytes += sizeof(*field);
        },
        key.field(config));
  }
  EXPECT_EQ(places.size(), ConfigKeys().size()) << "two rows share a member";
  const size_t padding = sizeof(double) - 3 * sizeof(bool)       // before engine.watchdog_seconds
                         + sizeof(std::string*) - sizeof(bool)   // after memory.host_weights
                         + sizeof(std::string*) - sizeof(bool)   // after metrics.vllm_aliases
                         + sizeof(std::string*) - sizeof(bool)   // after security.allow_insecure
                         + sizeof(std::string*) - sizeof(bool);  // after log.requests
  EXPECT_EQ(bytes + padding, sizeof(Config));
}

std::string ReadSource(const std::string& path) {
  const std::string root = __FILE__;
  const absl::StatusOr<std::string> text =
      ReadFileText(root.substr(0, root.rfind("tests/unit/")) + path, 1 << 20);
  EXPECT_TRUE(text.ok()) << text.status();
  return text.value_or("");
}

// Lines without comments, blank ones dropped: what the file sets, in order.
std::string WithoutComments(const std::string& yaml) {
  std::string out;
  for (absl::string_view line : absl::StrSplit(yaml, '\n')) {
    const absl::string_view code = absl::StripAsciiWhitespace(line);
    if (!code.empty() && code[0] != '#') absl::StrAppend(&out, line, "\n");
  }
  return out;
}

TEST(ConfigDocsTest, ReferenceFileHoldsEveryKeyWithItsDefault) {
  EXPECT_EQ(WithoutComments(ReadSource("deploy/dorad.yaml")), WithoutComments(ToYaml(Config())));
}

TEST(ConfigDocsTest, ReferenceFileExplainsEveryKey) {
  const std::vector<std::string> lines = absl::StrSplit(ReadSource("deploy/dorad.yaml"), '\n');
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string start = absl::StrCat("  ", key.name, ":");
    bool explained = false;
    for (size_t i = 1; i < lines.size(); ++i) {
      explained |= lines[i].rfind(start, 0) == 0 && lines[i - 1].rfind("  #", 0) == 0;
    }
    EXPECT_TRUE(explained) << key.path();
  }
}

// docs/reference/configuration.md has one row for each key: | `section.key` | default | values |.
TEST(ConfigDocsTest, TableInTheDocumentationIsComplete) {
  std::string expected;
  Config config;
  for (const ConfigKey& key : ConfigKeys()) {
    absl::StrAppend(&expected, "| `", key.path(), "` | `", ValueToYaml(key, &config), "` | ",
                    DescribeValues(key), " |\n");
  }
  std::string actual;
  const std::string page = ReadSource("docs/reference/configuration.md");
  for (absl::string_view line : absl::StrSplit(page, '\n')) {
    if (line.substr(0, 3) == "| `") absl::StrAppend(&actual, line, "\n");
  }
  EXPECT_EQ(actual, expected);
}

}  // namespace
}  // namespace dorad
