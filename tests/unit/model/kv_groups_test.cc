#include "server/model/kv_groups.h"

#include <map>
#include <set>

#include "tests/unit/support/test.h"

namespace dorad::model {
namespace {

// Every `pattern`-th layer sees all positions; 0: none does.
ModelConfig Config(int64_t layers, int64_t window, int64_t pattern) {
  ModelConfig config;
  config.layers.resize(static_cast<size_t>(layers));
  for (int64_t i = 0; i < layers; ++i) {
    const bool is_full = pattern > 0 && (i + 1) % pattern == 0;
    config.layers[i].attention.window = is_full ? 0 : window;
  }
  return config;
}

TEST(KvGroupsTest, LayersOfOneKindAreOneGroup) {
  for (const int64_t window : {0, 4096}) {
    const KvGroups groups(Config(32, window, 0));
    EXPECT_EQ(groups.slots, 32);
    EXPECT_EQ(groups.windows, std::vector<int64_t>{window});
    for (int64_t i = 0; i < 32; ++i) {
      EXPECT_EQ(groups.places[i].group, 0);
      EXPECT_EQ(groups.places[i].slot, i);
    }
  }
}

TEST(KvGroupsTest, DeltaNetsHaveNoPlace) {
  ModelConfig config = Config(8, 0, 0);
  for (const int layer : {0, 1, 2, 4, 5, 6}) config.layers[layer].delta.emplace();
  const KvGroups groups(config);
  EXPECT_EQ(groups.slots, 2);
  EXPECT_EQ(groups.places.size(), 2u);
  EXPECT_EQ(groups.windows, std::vector<int64_t>{0});
}

// The layers of Gemma 3 with 1B, 4B, 12B and 27B parameters, then of other mixtures.
TEST(KvGroupsTest, EachLayerHasAPlaceOfItsOwnAmongItsKind) {
  struct Case {
    int64_t layers, pattern;
    int64_t slots, groups;
  };
  for (const Case& c : {Case{26, 6, 4, 7}, Case{34, 6, 5, 7}, Case{48, 6, 8, 6}, Case{62, 6, 11, 6},
                        Case{28, 2, 14, 2}, Case{28, 4, 7, 4}, Case{3, 3, 1, 3}}) {
    SCOPED_TRACE(c.layers);
    const ModelConfig config = Config(c.layers, 1024, c.pattern);
    const KvGroups groups(config);
    EXPECT_EQ(groups.slots, c.slots);
    EXPECT_EQ(groups.windows.size(), static_cast<size_t>(c.groups));
    EXPECT_EQ(groups.windows.front(), 0) << "those that keep all come first";
    std::set<std::pair<int64_t, int64_t>> taken;
    for (int64_t i = 0; i < c.layers; ++i) {
      const KvGroups::Place& place = groups.places[i];
      EXPECT_LT(place.slot, groups.slots);
      EXPECT_EQ(groups.windows[place.group], config.layers[i].attention.window);
      EXPECT_TRUE(taken.emplace(place.group, place.slot).second);
    }
    EXPECT_LE(static_cast<double>(c.groups * c.slots), 1.1 * static_cast<double>(c.layers))
        << "idle places";
  }
}

}  // namespace
}  // namespace dorad::model
