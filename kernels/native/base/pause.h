// Spinning on a value that another core writes.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

// About 20 us: longer than the time between two operations of a model, shorter than that between two steps.
constexpr int SPINS_BEFORE_SLEEP = 1500;

inline void spin_pause() {
#ifdef __x86_64__
  _mm_pause();
#endif
}
