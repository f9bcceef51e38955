// The rows of one step for the decoder's kernels: plain pointers to device memory.
#pragma once

#include <cstdint>

namespace dorad::kernels {

// Tokens of one page of the key/value cache.
inline constexpr int32_t kKvPageTokens = 16;
// Lists of pages are read from a multiple of so many positions on.
inline constexpr int32_t kKvListTokens = 64;

// Of sequences with a recurrence. A state's pages follow each other in StepRows::pages.
struct StepStates {
  int32_t sequences = 0;
  const int32_t* row_begin = nullptr;  // [sequences + 1], of a sequence's rows
  const int32_t* to = nullptr;         // [sequences], index of the first page; -1: no state
  const int32_t* from = nullptr;       // the same before the rows; -1: zeros
};

struct StepRows {
  int32_t rows = 0;
  const int32_t* token_ids = nullptr;  // [rows]
  const int32_t* positions = nullptr;  // [rows], of the row's token in its sequence
  const int32_t* sequences = nullptr;  // [rows], index of the row's sequence in this step
  // Pages of sequence s: pages[page_begin[s] ...]; position p lies in its page p / kKvPageTokens. A
  // page's number is its distance from the begin of a layer's keys or values, in pages of these.
  // With a window the list may begin later: at the first position that a row sees, rounded down to
  // kKvListTokens. Then page_begin is where it would begin, and may be negative.
  const int32_t* page_begin = nullptr;  // [sequences]
  const int32_t* pages = nullptr;
  // [rows, 3], positions of the rotary embedding: time, height, width. Null: all are `positions`.
  const int32_t* rotary = nullptr;
  StepStates states;  // nulls without a recurrence
  // [rows], the last position that a row sees, its own or a later one of this step; ascending with
  // the positions of a sequence. Null: its own.
  const int32_t* reach = nullptr;
};

}  // namespace dorad::kernels
