// Weights in blocks of inputs, with the numbers of a quantized file as they are.
//
// A block is 16 or 32 inputs of an output. It has a scale in float16, and a minimum in float16 or none. A weight is
// scale * number + minimum, or scale * (number - zero) without minimums. Numbers are unsigned: bytes, or nibbles in
// blocks of 32.
//
// A panel consists of blocks of its 64 outputs: their scales, their minimums, then their numbers. Bytes are in the order
// of panels.h. Byte j of the 16 bytes of an output's nibbles has input j in the low bits and input j + 16 in the high
// bits, as in ggml's blocks.
//
// Inputs are signed bytes with a step per block, so the sum of a block's products is an exact integer. These sums are
// scaled, and added in the order of the blocks.
#pragma once
#include "panels.h"

constexpr int NIBBLE_BLOCK = 32;
constexpr int PANEL_HALVES_BYTES = PANEL * sizeof(uint16_t);
constexpr int NIBBLE_ZERO = 8;

// Returns the number that stands for zero in a weight without minimums.
inline int32_t block_zero(const Linear& weight) {
  return weight.has_minimums ? 0 : weight.is_in_nibbles ? NIBBLE_ZERO : BYTE_ZERO;
}

inline int64_t block_bytes(const Linear& weight) {
  return PANEL_HALVES_BYTES * (weight.has_minimums ? 2 : 1) +
         weight.block_inputs * PANEL / (weight.is_in_nibbles ? 2 : 1);
}

inline const char* panel_blocks(const Linear& weight, int64_t panel) {
  const int64_t num_blocks = weight.num_inputs / weight.block_inputs;
  return static_cast<const char*>(weight.packed) + panel * num_blocks * block_bytes(weight);
}

inline float half_to_float(uint16_t half) {
  // The exponent's bias differs by 112; the product makes denormals right, too. Scales are finite.
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13, sign = static_cast<uint32_t>(half >> 15) << 31;
  float value;
  std::memcpy(&value, &magnitude, sizeof(value));
  value *= 0x1p112f;
  return sign ? -value : value;
}

// Loads as many float16 as a part has lanes.
inline FloatPart load_halves(const char* from) {
#if defined(__AVX512F__)
  return (FloatPart)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return (FloatPart)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  FloatPart values;
  for (int i = 0; i < PART_LANES; ++i) {
    uint16_t half;
    std::memcpy(&half, from + i * sizeof(half), sizeof(half));
    values[i] = half_to_float(half);
  }
  return values;
#endif
}
