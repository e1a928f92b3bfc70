// Attention whose result goes through gates: one for each number, which the projection of queries makes beside them.
#pragma once
#include "layer_ops.h"

// From a row of the projection, heads of dim queries and dim gates and then rest numbers, to heads without gates and the
// rest, and to the gates.
template <typename T>
void split_gates(const T* row, T* heads, T* gates, int64_t num_heads, int64_t dim, int64_t rest) {
  for (int64_t head = 0; head < num_heads; ++head) {
    std::memcpy(heads + head * dim, row + 2 * head * dim, dim * sizeof(T));
    std::memcpy(gates + head * dim, row + (2 * head + 1) * dim, dim * sizeof(T));
  }
  std::memcpy(heads + num_heads * dim, row + 2 * num_heads * dim, rest * sizeof(T));
}

// found *= sigmoid(gates).
template <typename T>
void open_gates(const T* gates, T* found, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    const float open = to_float(from_float<T>(1.0f / (1.0f + fast_exp(-to_float(gates[i])))));
    found[i] = from_float<T>(to_float(found[i]) * open);
  }
}

// logits of the head: scaled, then capped, each rounded to T; a scale of 1 and a cap of 0 do nothing.
template <typename T>
void change_logits(float* logits, int64_t size, float scale, float cap) {
  const auto rounded = [](float value) { return to_float(from_float<T>(value)); };
  if (scale != 1.0f) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) logits[i] = rounded(logits[i] * scale);
  }
  if (cap > 0) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) logits[i] = rounded(rounded(fast_tanh(rounded(logits[i] / cap))) * cap);
  }
}
