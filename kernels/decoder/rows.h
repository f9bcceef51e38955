// The rows of one step for the decoder's kernels: plain pointers to device memory.
#pragma once

#include <cstdint>

namespace dorad::kernels {

// Tokens of one page of the key/value cache.
inline constexpr int32_t kKvPageTokens = 16;

struct StepRows {
  int32_t rows = 0;
  const int32_t* token_ids = nullptr;  // [rows]
  const int32_t* positions = nullptr;  // [rows], of the row's token in its sequence
  const int32_t* sequences = nullptr;  // [rows], index of the row's sequence in this step
  // Pages of sequence s: pages[page_begin[s] ...]; position p lies in its page p / kKvPageTokens. A
  // page's number is its distance from the begin of a layer's keys or values, in pages of these.
  const int32_t* page_begin = nullptr;  // [sequences]
  const int32_t* pages = nullptr;
  // [rows, 3], positions of the rotary embedding: time, height, width. Null: all are `positions`.
  const int32_t* rotary = nullptr;
};

}  // namespace dorad::kernels
