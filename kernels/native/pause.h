// A turn of a loop that waits for what another core writes.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

inline void pause_for_a_turn() {
#ifdef __x86_64__
  _mm_pause();
#endif
}
