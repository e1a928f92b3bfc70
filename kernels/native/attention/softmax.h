// Softmax weights from scores, sixteen at a time.
#pragma once
#include <algorithm>
#include <cmath>

#include "base/lanes.h"

constexpr float LOWEST_EXPONENT = -87.0f;

// exp as in fast_exp, and 0 below the lowest exponent; x is at most 0, up to rounding.
inline FloatPart exp_or_zero(FloatPart x) {
  // Adding this constant rounds to the nearest integer.
  constexpr float ROUNDER = 12582912.0f;
  const FloatPart t = x * 1.44269504088896341f;
  const FloatPart n = (t + ROUNDER) - ROUNDER;
  const FloatPart f = t - n;
  FloatPart p = 1.54035303933816e-4f - FloatPart{};
  p = p * f + 1.33335581464284e-3f;
  p = p * f + 9.61812910762848e-3f;
  p = p * f + 5.55041086648216e-2f;
  p = p * f + 2.40226506959101e-1f;
  p = p * f + 6.93147180559945e-1f;
  p = p * f + 1.0f;
  const IntPart power = (__builtin_convertvector(n, IntPart) + 127) << 23;
  return (FloatPart)((IntPart)(p * (FloatPart)power) & ~(x < LOWEST_EXPONENT));
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
  // In parts, because the compiler compares larger vectors one number at a time.
  FloatPart lane_maxima[PARTS];
  for (FloatPart& maxima : lane_maxima) maxima = -INFINITY - FloatPart{};
  for (int64_t i = 0; i < width; i += LANES) {
    for (int p = 0; p < PARTS; ++p) {
      const FloatPart scaled = (FloatPart)load_part(scores + i, p) * scale;
      lane_maxima[p] = scaled > lane_maxima[p] ? scaled : lane_maxima[p];
    }
  }
  float lanes[LANES], maximum = sink;
  std::memcpy(lanes, lane_maxima, sizeof(lanes));
  for (const float lane : lanes) maximum = std::max(maximum, lane);
  // One sum per lane, so that the order of additions does not depend on the masked positions.
  FloatPart totals[PARTS] = {};
  for (int64_t i = 0; i < width; i += LANES) {
    FloatPart exponentials[PARTS];
    for (int p = 0; p < PARTS; ++p) {
      exponentials[p] = exp_or_zero((FloatPart)load_part(scores + i, p) * scale - maximum);
      totals[p] += exponentials[p];
    }
    Floats all;
    std::memcpy(&all, exponentials, sizeof(all));
    store(weights + i, all, LANES);
  }
  std::memcpy(lanes, totals, sizeof(lanes));
  float total = std::exp(sink - maximum);
  for (const float lane : lanes) total += lane;
  return total;
}
