// The dtypes of the kernels: float, and bfloat16 stored as 16 bits. Arithmetic is always in float.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

enum class bfloat16 : uint16_t {};  // a scalar, because loops over a struct would not vectorise

inline float to_float(float value) { return value; }

inline float to_float(bfloat16 value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

template <typename T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

// To nearest, ties to even; NaN stays NaN.
template <>
inline bfloat16 from_float<bfloat16>(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<bfloat16>(is_nan ? 0x7fc0 : rounded);
}

// exp as 2^n * 2^f, with a polynomial for 2^f: relative error below 2e-7. Unlike the library's exp, it vectorises.
inline float fast_exp(float x) {
  x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
  float t = x * 1.44269504088896341f;
  float n = std::nearbyint(t);
  float f = t - n;
  float p = 1.54035303933816e-4f;
  p = p * f + 1.33335581464284e-3f;
  p = p * f + 9.61812910762848e-3f;
  p = p * f + 5.55041086648216e-2f;
  p = p * f + 2.40226506959101e-1f;
  p = p * f + 6.93147180559945e-1f;
  p = p * f + 1.0f;
  uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return p * power;
}

// tanh, relative error below 1e-6: a series for small arguments, else by exp.
inline float fast_tanh(float x) {
  const float power = fast_exp(-2.0f * std::fabs(x)), square = x * x;
  const float far = std::copysign((1.0f - power) / (1.0f + power), x);
  const float near = x * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315))));
  return square < 0.04f ? near : far;
}

// erf, absolute error below 2e-7 (Abramowitz and Stegun 7.1.26).
inline float fast_erf(float x) {
  const float size = std::fabs(x), t = 1.0f / (1.0f + 0.3275911f * size);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  return std::copysign(1.0f - p * t * fast_exp(-size * size), x);
}
