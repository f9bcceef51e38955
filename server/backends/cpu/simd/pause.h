// Tells the core that this thread spins: it saves power and lets the other hyperthread run.
// Thread-safe.
#pragma once

namespace dorad::ops {

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace dorad::ops
