// Attention whose result goes through gates, which the projection makes beside queries, keys and values.
#pragma once
#include "layer_ops.h"

// Behind each head's query; or behind all, one for each number of the result, or one for each head.
enum class AttentionGate : int64_t { NONE, WITH_QUERY, PER_ELEMENT, PER_HEAD };

// From a row of the projection to queries and the rest, keys and values, and to a gate for each number of the result.
template <typename T>
void split_gates(AttentionGate gate, const T* row, T* heads, T* gates, int64_t num_heads, int64_t dim, int64_t rest) {
  if (gate != AttentionGate::WITH_QUERY) {
    const int64_t size = num_heads * dim + rest;
    std::memcpy(heads, row, size * sizeof(T));
    for (int64_t i = 0; i < num_heads * dim; ++i) gates[i] = row[size + (gate == AttentionGate::PER_HEAD ? i / dim : i)];
    return;
  }
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
