// Rotation of rows before they become bytes. All bytes of a row share a step, which its largest input decides. So a row
// is multiplied with orthonormal Hadamard matrices, which spread an outlier over its whole block; weights are rotated
// alike when they are packed, and the products stay the same. (Ashkboos et al. 2024, arXiv:2404.00456.)
//
// A row is cut into blocks of 512, and the rest into the powers of two of its size, the largest first.
#pragma once
#include <cmath>
#include <utility>

#include "base/lanes.h"

constexpr int64_t ROTATED_BLOCK = 512;
constexpr int PART_LANES = PART_BYTES / sizeof(float);

// Returns the sums (in lanes without bit H) and differences of the lanes that differ in bit H only.
template <int H, int... LANE>
inline __attribute__((always_inline)) FloatPart add_and_subtract(FloatPart part,
                                                                 std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
  const FloatPart other = __builtin_shufflevector(part, part, (LANE ^ H)...);
#else
  const FloatPart other = __builtin_shuffle(part, IntPart{(LANE ^ H)...});
#endif
  return other + part * FloatPart{(LANE & H ? -1.0f : 1.0f)...};
}

template <int H>
inline __attribute__((always_inline)) FloatPart rotate_part(FloatPart part) {
  if constexpr (H < PART_LANES) {
    const FloatPart next = add_and_subtract<H>(part, std::make_integer_sequence<int, PART_LANES>{});
    return rotate_part<2 * H>(next);
  }
  return part;
}

// Rotates V parts, stride floats apart, at each place of a block; the first stage also within parts.
template <int V, bool IS_FIRST>
void rotate_parts(float* values, int64_t size, int64_t stride, float factor) {
  for (float *group = values; group < values + size; group += V * stride) {
    for (float* at = group; at < group + stride; at += PART_LANES) {
      FloatPart parts[V];
      for (int v = 0; v < V; ++v) {
        std::memcpy(&parts[v], at + v * stride, sizeof(FloatPart));
        if constexpr (IS_FIRST) parts[v] = rotate_part<1>(parts[v]);
      }
      for (int half = 1; half < V; half *= 2) {
        for (int v = 0; v < V; ++v) {
          if (v & half) continue;
          const FloatPart sum = parts[v] + parts[v + half], difference = parts[v] - parts[v + half];
          parts[v] = sum, parts[v + half] = difference;
        }
      }
      for (int v = 0; v < V; ++v) {
        parts[v] *= factor;
        std::memcpy(at + v * stride, &parts[v], sizeof(FloatPart));
      }
    }
  }
}

template <bool IS_FIRST>
void rotate_stages(float* values, int64_t size, int64_t stride, float factor) {
  const int64_t num = size / stride;
  if (num >= 16) {
    rotate_parts<8, IS_FIRST>(values, size, stride, 1.0f);
    return rotate_stages<false>(values, size, 8 * stride, factor);
  }
  if (num == 8) return rotate_parts<8, IS_FIRST>(values, size, stride, factor);
  if (num == 4) return rotate_parts<4, IS_FIRST>(values, size, stride, factor);
  if (num == 2) return rotate_parts<2, IS_FIRST>(values, size, stride, factor);
  rotate_parts<1, IS_FIRST>(values, size, stride, factor);
}

// Multiplies a block, whose size is a power of two, with the Hadamard matrix.
inline void rotate_block(float* values, int64_t size) {
  const float factor = 1.0f / std::sqrt(static_cast<float>(size));
  if (size >= PART_LANES) return rotate_stages<true>(values, size, PART_LANES, factor);
  for (int64_t half = 1; half < size; half *= 2) {
    for (int64_t i = 0; i < size; ++i) {
      if (i & half) continue;
      const float sum = values[i] + values[i + half], difference = values[i] - values[i + half];
      values[i] = sum, values[i + half] = difference;
    }
  }
  for (int64_t i = 0; i < size; ++i) values[i] *= factor;
}

// Writes the rotated row. The bits are the same on every processor.
template <typename T>
void rotate_row(const T* row, float* out, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) out[i] = to_float(row[i]);
  int64_t block = ROTATED_BLOCK;
  for (int64_t start = 0; start < size; start += block) {
    while (block > size - start) block /= 2;
    rotate_block(out + start, block);
  }
}
