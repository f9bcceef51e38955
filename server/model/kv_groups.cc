#include "server/model/kv_groups.h"

#include <algorithm>
#include <map>

namespace dorad::model {
namespace {

// More groups waste fewer places of pages; each group costs a table of pages in every step.
constexpr int64_t kMostGroups = 8;
// The length of sequences, in windows, for which the groups are chosen.
constexpr int64_t kWindows = 4;

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

KvGroups::KvGroups(const ModelConfig& config) {
  std::map<int64_t, int64_t> layers;  // by window
  for (const LayerSpec& layer : config.layers) {
    if (!layer.delta) ++layers[layer.attention.window];
  }
  int64_t least = -1;
  for (int64_t size = config.num_attention_layers(); size > 0; --size) {
    int64_t groups = 0, cost = 0;
    for (const auto& [window, count] : layers) {
      const int64_t of_window = DivideUp(count, size);
      groups += of_window;
      cost += of_window * size * (window > 0 ? 1 : kWindows);
    }
    if (layers.size() > 1 && groups > kMostGroups) continue;
    if (least >= 0 && cost >= least) continue;
    least = cost;
    slots = size;
  }
  std::map<int64_t, int64_t> first;  // group, by window
  for (const auto& [window, count] : layers) {
    first[window] = static_cast<int64_t>(windows.size());
    windows.insert(windows.end(), static_cast<size_t>(DivideUp(count, slots)), window);
  }
  std::map<int64_t, int64_t> placed;
  for (const LayerSpec& layer : config.layers) {
    if (layer.delta) continue;
    const int64_t window = layer.attention.window;
    const int64_t number = placed[window]++;
    places.push_back({first[window] + number / slots, number % slots});
  }
}

}  // namespace dorad::model
