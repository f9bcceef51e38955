// Gated delta-nets: reading their sizes, and the place of a sequence's recurrent state in pages of
// the KV cache. Torch-free. Plain values and therefore thread-safe.
#pragma once

#include <cstdint>

#include "server/model/config_json.h"
#include "server/model/model_config.h"

namespace dorad::model {

// Which layers are delta-nets, and their sizes. REQUIRES: the heads and layers are read.
void ReadDeltaNets(Fields& text, ModelConfig* config);

// A sequence's state has whole pages of the KV cache, so that one memory serves both. A page is
// `blocks` contiguous blocks of memory. Each delta-net has, in this order of blocks:
//   for each value head and each of its tiles: [key_dim, tile] fp32, `tile` columns of the state
//   the convolution's last rows: [convolution - 1, qkv_size], in as many blocks as they need
class DeltaStateLayout {
 public:
  DeltaStateLayout() = default;  // no state
  // element_bytes: of the convolution's rows.
  DeltaStateLayout(const ModelConfig& config, int64_t block_bytes, int64_t blocks,
                   int64_t element_bytes);

  // Of a sequence; 0: the model has no delta-nets.
  int64_t pages() const { return pages_; }
  int64_t tile() const { return tile_; }
  // Of a delta-net: all, and those of the state, which come first.
  int64_t net_blocks() const { return net_blocks_; }
  int64_t state_blocks() const { return state_blocks_; }

  struct Block {
    int64_t page = 0;   // of the sequence's pages
    int64_t block = 0;  // in the page
  };
  // The i-th of a delta-net; net: its number among the model's. Blocks that follow each other lie
  // in one place of pages that follow each other, so that a net's memory is as near as its pages
  // are.
  Block BlockAt(int64_t net, int64_t i) const {
    const int64_t index = net * net_blocks_ + i;
    return {index % pages_, index / pages_};
  }

 private:
  int64_t tile_ = 0;
  int64_t state_blocks_ = 0;  // of a delta-net
  int64_t net_blocks_ = 0;
  int64_t pages_ = 0;
};

}  // namespace dorad::model
