// Layers with keys and values in groups that share the pages of one KV cache: a page has the keys
// and values of one group's layers, so that layers with a window can give back pages that other
// layers keep. Torch-free. Plain values and therefore thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "server/model/model_config.h"

namespace dorad::model {

// Groups have layers of one window only, and equally many, save that the last group of a window may
// have fewer: its pages have idle places.
struct KvGroups {
  explicit KvGroups(const ModelConfig& config);

  struct Place {
    int64_t group = 0;
    int64_t slot = 0;  // in the group's pages
  };

  int64_t slots = 0;             // layers of a page
  std::vector<int64_t> windows;  // of each group; 0: it keeps all positions. Those come first.
  std::vector<Place> places;     // of each layer with attention
};

}  // namespace dorad::model
