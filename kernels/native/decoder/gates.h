// Sigmoid gates on the attention output. The QKV projection computes them.
#pragma once
#include "decoder/layer_ops.h"

// Position of the gates in a row of the projection: after each head's query; or after all heads, one per element of the
// attention output or one per head. Matches AttentionGate in kernels/decoder/weights.py.
enum class AttentionGate : int64_t { NONE, WITH_QUERY, PER_ELEMENT, PER_HEAD };

// Splits a row of the projection into heads (queries, then keys and values) and one gate per element of the output.
template <typename T>
void split_gates(AttentionGate gate, const T* row, T* heads, T* gates, int64_t num_heads, int64_t dim, int64_t rest) {
  if (gate != AttentionGate::WITH_QUERY) {
    const int64_t size = num_heads * dim + rest;
    std::memcpy(heads, row, size * sizeof(T));
    const bool is_per_head = gate == AttentionGate::PER_HEAD;
    for (int64_t i = 0; i < num_heads * dim; ++i) gates[i] = row[size + (is_per_head ? i / dim : i)];
    return;
  }
  for (int64_t head = 0; head < num_heads; ++head) {
    std::memcpy(heads + head * dim, row + 2 * head * dim, dim * sizeof(T));
    std::memcpy(gates + head * dim, row + (2 * head + 1) * dim, dim * sizeof(T));
  }
  std::memcpy(heads + num_heads * dim, row + 2 * num_heads * dim, rest * sizeof(T));
}

// out *= sigmoid(gates).
template <typename T>
void apply_gates(const T* gates, T* out, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    const float gate_value = to_float(from_float<T>(1.0f / (1.0f + fast_exp(-to_float(gates[i])))));
    out[i] = from_float<T>(to_float(out[i]) * gate_value);
  }
}

// Scales, then caps logits, rounding to T after each; a scale of 1 and a cap of 0 have no effect.
template <typename T>
void scale_and_cap_logits(float* logits, int64_t size, float scale, float cap) {
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
