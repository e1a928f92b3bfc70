// From scores to weights, sixteen at a time.
#pragma once
#include <algorithm>
#include <cmath>

#include "lanes.h"

constexpr float LOWEST_EXPONENT = -87.0f;

// exp as fast_exp has it, and 0 below the lowest exponent; x is at most 0, or nearly so.
inline Floats exp_or_zero(Floats x) {
  // Adding so much rounds to the nearest whole number.
  constexpr float ROUNDER = 12582912.0f;
  const Floats t = x * splat(1.44269504088896341f);
  const Floats n = (t + splat(ROUNDER)) - splat(ROUNDER);
  const Floats f = t - n;
  Floats p = splat(1.54035303933816e-4f);
  p = p * f + splat(1.33335581464284e-3f);
  p = p * f + splat(9.61812910762848e-3f);
  p = p * f + splat(5.55041086648216e-2f);
  p = p * f + splat(2.40226506959101e-1f);
  p = p * f + splat(6.93147180559945e-1f);
  p = p * f + splat(1.0f);
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return (Floats)((Ints)(p * (Floats)power) & ~(x < splat(LOWEST_EXPONENT)));
}

// Scores begin .. end, scaled, then capped: what comes of it is to be scaled no more.
inline void cap_scores(float* scores, int64_t begin, int64_t end, float scale, float cap) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) scores[i] = cap * fast_tanh(scores[i] * scale / cap);
}

// Scores, still to be scaled, to weights relative to the largest: of begin .. end, and 0 for the others of width, which
// is a multiple of 16. Returns their sum before they are rounded to T, and that of the sink, a score without a value;
// -INFINITY where there is none.
template <typename T>
float soften(float* scores, T* weights, int64_t begin, int64_t end, int64_t width, float scale, float sink) {
  std::fill(scores, scores + begin, -INFINITY);
  std::fill(scores + end, scores + width, -INFINITY);
  const Floats factor = splat(scale);
  Floats most = splat(-INFINITY);
  for (int64_t i = 0; i < width; i += LANES) {
    const Floats scaled = (Floats)load_words(scores + i) * factor;
    most = scaled > most ? scaled : most;
  }
  float highest = sink;
  for (int lane = 0; lane < LANES; ++lane) highest = std::max(highest, most[lane]);
  // Lane by lane, so that the order of the sum does not depend on what is masked around it.
  Floats totals = {};
  for (int64_t i = 0; i < width; i += LANES) {
    const Floats exponentials = exp_or_zero((Floats)load_words(scores + i) * factor - splat(highest));
    totals += exponentials;
    store(weights + i, exponentials, LANES);
  }
  float total = std::exp(sink - highest);
  for (int lane = 0; lane < LANES; ++lane) total += totals[lane];
  return total;
}
