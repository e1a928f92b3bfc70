// Softmax weights from scores, sixteen at a time.
#pragma once
#include <algorithm>
#include <cmath>

#include "lanes.h"

constexpr float LOWEST_EXPONENT = -87.0f;

// exp as in fast_exp, and 0 below the lowest exponent; x is at most 0, up to rounding.
inline Floats exp_or_zero(Floats x) {
  // Adding this constant rounds to the nearest integer.
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

// Scales, then caps scores begin .. end; the result must not be scaled again.
inline void cap_scores(float* scores, int64_t begin, int64_t end, float scale, float cap) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) scores[i] = cap * fast_tanh(scores[i] * scale / cap);
}

// Turns unscaled scores begin .. end into weights relative to the largest, and sets the other weights of width, a
// multiple of 16, to 0. Returns the sum of the weights before they are rounded to T, including the weight of the sink,
// a score without a value (-INFINITY for none).
template <typename T>
float softmax_weights(float* scores, T* weights, int64_t begin, int64_t end, int64_t width, float scale, float sink) {
  std::fill(scores, scores + begin, -INFINITY);
  std::fill(scores + end, scores + width, -INFINITY);
  const Floats factor = splat(scale);
  Floats lane_maxima = splat(-INFINITY);
  for (int64_t i = 0; i < width; i += LANES) {
    const Floats scaled = (Floats)load_words(scores + i) * factor;
    lane_maxima = scaled > lane_maxima ? scaled : lane_maxima;
  }
  float maximum = sink;
  for (int lane = 0; lane < LANES; ++lane) maximum = std::max(maximum, lane_maxima[lane]);
  // One sum per lane, so that the order of additions does not depend on the masked positions.
  Floats totals = {};
  for (int64_t i = 0; i < width; i += LANES) {
    const Floats exponentials = exp_or_zero((Floats)load_words(scores + i) * factor - splat(maximum));
    totals += exponentials;
    store(weights + i, exponentials, LANES);
  }
  float total = std::exp(sink - maximum);
  for (int lane = 0; lane < LANES; ++lane) total += totals[lane];
  return total;
}
