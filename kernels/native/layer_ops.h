// What happens to one row between the products of a layer, rounded where transformers rounds.
#pragma once
#include "scalar.h"

// residual += added.
template <typename T>
void add_row(const T* added, T* residual, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) residual[i] = from_float<T>(to_float(added[i]) + to_float(residual[i]));
}

// out = values scaled to a root mean square of one, times weight. out may be values.
template <typename T>
void norm_row(const T* values, const T* weight, T* out, int64_t size, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += to_float(values[i]) * to_float(values[i]);
  const float factor = 1.0f / std::sqrt(sum / size + eps);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    out[i] = from_float<T>(to_float(from_float<T>(to_float(values[i]) * factor)) * to_float(weight[i]));
  }
}

// out = head, of head_dim elements, rotated by the angles. out may be head.
template <typename T>
void rotate_row(const T* head, const T* cos, const T* sin, T* out, int64_t head_dim) {
  const int64_t half = head_dim / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float first = to_float(head[i]), second = to_float(head[i + half]);
    out[i] = from_float<T>(first * to_float(cos[i]) - second * to_float(sin[i]));
    out[i + half] = from_float<T>(second * to_float(cos[i + half]) + first * to_float(sin[i + half]));
  }
}

// out = silu(gate) * up; gate_up holds size of each.
template <typename T>
void gate_row(const T* gate_up, T* out, int64_t size) {
  const T* up = gate_up + size;
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    const float gate = to_float(gate_up[i]);
    out[i] = from_float<T>(to_float(from_float<T>(gate / (1.0f + fast_exp(-gate)))) * to_float(up[i]));
  }
}
