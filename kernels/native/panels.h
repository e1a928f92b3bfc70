// How a weight is laid out for products with it, and rows of inputs in bytes.
//
// The weight [N, K] lies in panels of 64 outputs: for each group of inputs (see lanes.h) 64 outputs' groups side by
// side, so that one pass over a panel reads memory in order. Outputs beyond N are zero. Weights of four bits: nibbles.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"
#include "parallel.h"

constexpr int PANEL_VECTORS = 4;
constexpr int PANEL = PANEL_VECTORS * LANES;
constexpr int PANEL_ROW_BYTES = PANEL * GROUP_BYTES;  // of a panel for one group of inputs

// As kernels/decoder has it, too.
struct Linear {
  const void* packed;
  const float* bias;       // as many as the panels have outputs, or null
  const float* scales;     // of each output's weights, which are then bytes with signs; null where they are of the dtype
  const int32_t* offsets;  // what an output's sum is too large, since inputs are counted from 128
  int64_t num_inputs, num_outputs;
  int64_t is_in_nibbles;  // 1: those bytes are made of four bits each as they are read
};

constexpr int BYTE_ZERO = 128, BYTE_RANGE = 127;

// Rows of bytes without signs, and the step of each row.
struct QuantizedRows {
  const uint8_t* values;
  const float* steps;
};

template <typename T>
void quantize_row(const T* row, uint8_t* out, float* step, int64_t size) {
  float largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::fabs(to_float(row[i])));
  *step = largest / BYTE_RANGE;
  const float factor = largest > 0 ? BYTE_RANGE / largest : 0.0f;
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    out[i] = static_cast<uint8_t>(static_cast<int32_t>(std::nearbyint(to_float(row[i]) * factor)) + BYTE_ZERO);
  }
}

// Rows of row_bytes each, of which the first size have something in them.
template <typename T>
QuantizedRows quantize_rows(const T* rows, int64_t stride, int64_t num_rows, int64_t size, int64_t row_bytes) {
  static thread_local std::vector<uint8_t> values;
  static thread_local std::vector<float> steps;
  if (static_cast<int64_t>(values.size()) < num_rows * row_bytes) values.resize(num_rows * row_bytes);
  if (static_cast<int64_t>(steps.size()) < num_rows) steps.resize(num_rows);
  const QuantizedRows made{values.data(), steps.data()};
  uint8_t* to = values.data();
  float* step = steps.data();
  for_ranges(num_rows, 8, [&](int64_t start, int64_t end) {
    for (int64_t row = start; row < end; ++row) quantize_row(rows + row * stride, to + row * row_bytes, step + row, size);
  });
  return made;
}
