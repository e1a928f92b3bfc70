// Operations on one row between the products of a layer. They round where transformers rounds.
#pragma once
#include "base/scalar.h"

// residual += added.
template <typename T>
void add_row(const T* added, T* residual, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) residual[i] = from_float<T>(to_float(added[i]) + to_float(residual[i]));
}

// out = values scaled to a root mean square of one, times weight. The scaled values are rounded before the product if
// the weight has the dtype of the values, and not if it is float. out may be values.
template <typename T, typename W>
void norm_row(const T* values, const W* weight, T* out, int64_t size, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += to_float(values[i]) * to_float(values[i]);
  const float factor = 1.0f / std::sqrt(sum / size + eps);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    const float scaled = to_float(values[i]) * factor;
    if constexpr (sizeof(W) == sizeof(T)) {
      out[i] = from_float<T>(to_float(from_float<T>(scaled)) * to_float(weight[i]));
    } else {
      out[i] = from_float<T>(scaled * to_float(weight[i]));
    }
  }
}

// out = values with a mean of zero and a deviation of one, times weight, plus bias unless it is null. out may be
// values.
template <typename T>
void centred_norm_row(const T* values, const float* weight, const float* bias, T* out, int64_t size, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += to_float(values[i]);
  const float mean = sum / size;
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < size; ++i) squares += (to_float(values[i]) - mean) * (to_float(values[i]) - mean);
  const float factor = 1.0f / std::sqrt(squares / size + eps);
  if (bias) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      out[i] = from_float<T>((to_float(values[i]) - mean) * factor * weight[i] + bias[i]);
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) out[i] = from_float<T>((to_float(values[i]) - mean) * factor * weight[i]);
  }
}

// values *= scale.
template <typename T>
void scale_row(T* values, float scale, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) values[i] = from_float<T>(to_float(values[i]) * scale);
}

// out = head, of head_dim elements, rotated by the angles. out may be head.
template <typename T, typename A>
void rotate_row(const T* head, const A* cos, const A* sin, T* out, int64_t head_dim) {
  const int64_t half = head_dim / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float first = to_float(head[i]), second = to_float(head[i + half]);
    out[i] = from_float<T>(first * to_float(cos[i]) - second * to_float(sin[i]));
    out[i + half] = from_float<T>(second * to_float(cos[i + half]) + first * to_float(sin[i + half]));
  }
}

// Rotates pairs of adjacent elements in place.
template <typename T>
void rotate_neighbours(T* head, const float* cos, const float* sin, int64_t head_dim) {
#pragma omp simd
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    const float first = to_float(head[2 * i]), second = to_float(head[2 * i + 1]);
    head[2 * i] = from_float<T>(first * cos[i] - second * sin[i]);
    head[2 * i + 1] = from_float<T>(second * cos[i] + first * sin[i]);
  }
}

struct Silu {
  static float of(float x) { return x / (1.0f + fast_exp(-x)); }
};

// (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y)).
struct GeluTanh {
  static float of(float x) { return x / (1.0f + fast_exp(-1.5957691216057308f * (x + 0.044715f * x * x * x))); }
};

struct Gelu {
  static float of(float x) { return 0.5f * x * (1.0f + fast_erf(x * 0.7071067811865476f)); }
};

struct SquaredRelu {
  static float of(float x) { return x > 0 ? x * x : 0.0f; }
};

// out = activation(gate) * up; gate_up holds size of each.
template <typename A, typename T>
void gate_row(const T* gate_up, T* out, int64_t size) {
  const T* up = gate_up + size;
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    out[i] = from_float<T>(to_float(from_float<T>(A::of(to_float(gate_up[i])))) * to_float(up[i]));
  }
}

// out = activation(values).
template <typename A, typename T>
void activate_row(const T* values, T* out, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) out[i] = from_float<T>(A::of(to_float(values[i])));
}
