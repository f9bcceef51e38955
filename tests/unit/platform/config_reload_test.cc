#include "server/platform/config/config_reload.h"

#include "server/platform/files/file.h"
#include "tests/unit/support/test.h"

namespace dorad {
namespace {

TEST(ConfigReloadTest, TakesWhatMayChangeAndNamesTheRest) {
  Config current, next;
  next.server.drain_timeout_seconds = 7;
  next.limits.max_n = 3;
  next.log.level = "debug";
  next.model.path = "/other";
  next.adapters.preload = {{"a", "/a"}};
  const ConfigChanges changes = TakeReloadable(next, &current);
  EXPECT_THAT(changes.applied,
              ElementsAre("server.drain_timeout_seconds", "limits.max_n", "log.level"));
  EXPECT_THAT(changes.waiting, ElementsAre("model.path", "adapters.preload"));
  EXPECT_EQ(current.server.drain_timeout_seconds, 7);
  EXPECT_EQ(current.limits.max_n, 3);
  EXPECT_EQ(current.log.level, "debug");
  EXPECT_EQ(current.model.path, "");
  EXPECT_THAT(current.adapters.preload, IsEmpty());
}

TEST(ConfigReloadTest, TheSameConfigurationChangesNothing) {
  Config current;
  const ConfigChanges changes = TakeReloadable(Config(), &current);
  EXPECT_THAT(changes.applied, IsEmpty());
  EXPECT_THAT(changes.waiting, IsEmpty());
}

TEST(ConfigReloadTest, TakenKeysHaveTheirNewValues) {
  Config current, next;
  for (const ConfigKey& key : ConfigKeys()) {
    if (!IsReloadable(key)) continue;
    std::visit(
        [](auto* field) {
          using Type = std::decay_t<decltype(*field)>;
          if constexpr (std::is_same_v<Type, int64_t> || std::is_same_v<Type, double>) *field += 1;
          if constexpr (std::is_same_v<Type, bool>) *field = !*field;
          if constexpr (std::is_same_v<Type, std::string>) *field += "x";
        },
        key.field(next));
  }
  TakeReloadable(next, &current);
  EXPECT_EQ(ToYaml(current), ToYaml(next));
  EXPECT_NE(ToYaml(current), ToYaml(Config()));
}

// docs/guides/operations.md lists them, one a row: | `section.key` | ... |
TEST(ConfigReloadTest, TheManualListsTheKeysThatCanBeReloaded) {
  const std::string here = __FILE__;
  const auto page = ReadFileText(
      here.substr(0, here.rfind("tests/unit/")) + "docs/guides/operations.md", 1 << 20);
  ASSERT_TRUE(page.ok()) << page.status();
  const std::string text = *page;
  const size_t begin = text.find("## Reloading");
  ASSERT_NE(begin, std::string::npos);
  const std::string section = text.substr(begin, text.find("\n## ", begin) - begin);
  std::vector<std::string> listed, reloadable;
  for (const absl::string_view line : absl::StrSplit(section, '\n')) {
    const std::vector<std::string> parts = absl::StrSplit(line, '`');
    if (parts.size() > 1 && parts[0] == "| ") listed.push_back(parts[1]);
  }
  for (const ConfigKey& key : ConfigKeys()) {
    if (IsReloadable(key)) reloadable.push_back(key.path());
  }
  EXPECT_THAT(listed, UnorderedElementsAreArray(reloadable));
}

}  // namespace
}  // namespace dorad
