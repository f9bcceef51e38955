// A search by one thread.
#pragma once

namespace dorad::kernels {

// The last i of [0, count) whose first(i) is not more than `value`; first ascends, and first(0) is
// not more.
template <typename F>
__device__ inline int LastNotAfter(int count, int value, F first) {
  int last = 0;
#pragma unroll 1
  while (count > 1) {
    const int half = count / 2;
    if (first(last + half) <= value) {
      last += half;
      count -= half;
    } else {
      count = half;
    }
  }
  return last;
}

}  // namespace dorad::kernels
