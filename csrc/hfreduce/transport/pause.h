// Of threads that wait by looking again and again.
#pragma once

namespace hfreduce {

// Leaves the core to its other thread for some cycles.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace hfreduce
