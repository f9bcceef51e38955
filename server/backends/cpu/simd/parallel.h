// Loops over rows that use the thread team only for enough work.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "server/backends/cpu/ops/thread_team.h"

namespace dorad::ops::cpu {

// Calls work(begin, end) for ranges that cover [0, rows). `cost` of a row: elements touched.
inline void ForRows(int64_t rows, int64_t cost, absl::FunctionRef<void(int64_t, int64_t)> work) {
  constexpr int64_t kTaskCost = 16 << 10;  // some microseconds
  if (rows * cost < 2 * kTaskCost) {
    if (rows > 0) work(0, rows);
    return;
  }
  const int64_t block = std::max<int64_t>(1, kTaskCost / std::max<int64_t>(1, cost));
  Team().Run((rows + block - 1) / block,
             [&](int64_t i) { work(i * block, std::min(rows, (i + 1) * block)); });
}

}  // namespace dorad::ops::cpu
