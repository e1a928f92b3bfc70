// Loops that wait for what another core writes: a turn of them, and how many before who waits sleeps.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

// Some 20 us: longer than the time between two operations of a model, shorter than that between two steps.
constexpr int SPINS_BEFORE_SLEEP = 1500;

inline void pause_for_a_turn() {
#ifdef __x86_64__
  _mm_pause();
#endif
}
