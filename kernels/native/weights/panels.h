// Layout of a packed weight, and quantization of input rows to bytes.
//
// A weight [N, K] is packed in panels of 64 outputs: for each group of inputs (see lanes.h), the groups of 64 outputs
// are adjacent, so that a pass over a panel reads memory in order. Outputs beyond N are zero. Four-bit weights:
// nibbles.h. Weights in blocks: blocks.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "base/lanes.h"
#include "base/parallel.h"
#include "weights/rotation.h"

constexpr int PANEL_VECTORS = 4;
constexpr int PANEL = PANEL_VECTORS * LANES;
constexpr int PANEL_ROW_BYTES = PANEL * GROUP_BYTES;  // bytes of a panel per group of inputs

// Matches LinearStruct in kernels/linear.
struct Linear {
  const void* packed;
  // Each has an element per output of the panels.
  const float* bias;       // null for none
  const float* scales;     // scales of weights in signed bytes; null for unquantized weights
  const int32_t* offsets;  // subtracted from an output's sum, since quantized inputs have a zero point of 128
  int64_t num_inputs, num_outputs;
  int64_t is_in_nibbles;  // 1 for four-bit weights
  int64_t block_inputs;   // inputs that share a scale in the file of the weight (blocks.h); 0 for other weights
  int64_t block_bits;     // bits of a number in blocks
  int64_t has_minimums;   // 1 for blocks with minimums
};

constexpr int BYTE_ZERO = 128, BYTE_RANGE = 127;

// Rows of unsigned bytes, and the scale of each row.
struct QuantizedRows {
  const uint8_t* values;
  const float* steps;
};

inline int32_t bits_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Sets the step of bytes for these numbers; returns the factor that converts them to bytes.
inline float choose_step(const float* numbers, int64_t size, float* step) {
  // Bits without the sign compare like the numbers. Clang vectorizes a maximum of integers, but not of floats.
  int32_t largest_bits = 0;
#pragma omp simd reduction(max : largest_bits)
  for (int64_t i = 0; i < size; ++i) largest_bits = std::max(largest_bits, bits_of(std::fabs(numbers[i])));
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof(largest));
  *step = largest / BYTE_RANGE;
  return largest > 0 ? BYTE_RANGE / largest : 0.0f;
}

inline void quantize_row(const float* row, uint8_t* out, float* step, int64_t size) {
  const float factor = choose_step(row, size, step);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    out[i] = static_cast<uint8_t>(static_cast<int32_t>(std::nearbyint(row[i] * factor)) + BYTE_ZERO);
  }
}

// Rotates rows and quantizes them to row_bytes each; only the first size bytes are written.
template <typename T>
QuantizedRows quantize_rows(const T* rows, int64_t stride, int64_t num_rows, int64_t size, int64_t row_bytes) {
  static thread_local std::vector<uint8_t> values;
  static thread_local std::vector<float> steps;
  if (static_cast<int64_t>(values.size()) < num_rows * row_bytes) values.resize(num_rows * row_bytes);
  if (static_cast<int64_t>(steps.size()) < num_rows) steps.resize(num_rows);
  const QuantizedRows result{values.data(), steps.data()};
  uint8_t* to = values.data();
  float* step = steps.data();
  for_ranges(num_rows, 8, [&](int64_t start, int64_t end) {
    static thread_local std::vector<float> rotated;
    if (static_cast<int64_t>(rotated.size()) < size) rotated.resize(size);
    for (int64_t row = start; row < end; ++row) {
      rotate_row(rows + row * stride, rotated.data(), size);
      quantize_row(rotated.data(), to + row * row_bytes, step + row, size);
    }
  });
  return result;
}
