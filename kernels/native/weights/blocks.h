// Weights in blocks of inputs, with the numbers of a quantized file as they are.
//
// A block is 16 or 32 inputs of an output. It has a scale in float16, and a minimum in float16 or none. A weight is
// scale * number + minimum, or scale * (number - zero) without minimums. Numbers are unsigned and have 4 or 8 bits, or
// 5 bits in blocks of 32 and 6 bits in blocks of 16.
//
// A panel consists of blocks of its 64 outputs: their scales, their minimums, then their numbers. Bytes are in the
// order of panels.h. Other numbers are nibbles: byte j of an output's nibbles has input j in the low bits, and the
// input half a block later in the high bits, as in ggml's blocks. Before the nibbles of 5 or 6 bits is a word per
// output with the upper bits: byte j of it has those of inputs j, j + 4, j + 8, ..., from the lowest bits on.
//
// Inputs are signed bytes with a step per block, so the sum of a block's products is an exact integer. These sums are
// scaled, and added in the order of the blocks.
#pragma once
#include "weights/panels.h"

constexpr int MAX_BLOCK_INPUTS = 32;
constexpr int PANEL_HALVES_BYTES = PANEL * sizeof(uint16_t);
constexpr int NIBBLE_BITS = 4;

// Returns the number that stands for zero in a weight without minimums.
inline int32_t block_zero(const Linear& weight) {
  return weight.has_minimums ? 0 : 1 << (weight.block_bits - 1);
}

inline int64_t block_bytes(const Linear& weight) {
  return PANEL_HALVES_BYTES * (weight.has_minimums ? 2 : 1) + weight.block_inputs * weight.block_bits * PANEL / 8;
}

inline const char* panel_blocks(const Linear& weight, int64_t panel) {
  const int64_t num_blocks = weight.num_inputs / weight.block_inputs;
  return static_cast<const char*>(weight.packed) + panel * num_blocks * block_bytes(weight);
}

// Numbers of a block, and their position after its scales and minimums.
template <int BITS_EACH, int BLOCK_INPUTS_EACH, bool WITH_MINIMUMS>
struct BlockForm {
  static constexpr int BITS = BITS_EACH, INPUTS = BLOCK_INPUTS_EACH;
  static constexpr bool HAS_MINIMUMS = WITH_MINIMUMS;
  static constexpr int HEAD = PANEL_HALVES_BYTES * (HAS_MINIMUMS ? 2 : 1), BYTES = HEAD + INPUTS * BITS * PANEL / 8;
  static constexpr int GROUPS = INPUTS / GROUP_BYTES, HALF = GROUPS / 2, UPPER_BITS = BITS - NIBBLE_BITS;
  static constexpr bool HAS_UPPER_BITS = UPPER_BITS > 0 && BITS < 8;
  static_assert(!HAS_UPPER_BITS || UPPER_BITS * GROUPS == 8, "the upper bits of an output fill a word");

  // Calls use(group, bytes) for the groups of a part of a vector of outputs, whose numbers begin at `numbers`.
  template <typename Use>
  static inline __attribute__((always_inline)) void for_groups(const char* numbers, int part, const Use& use) {
    if constexpr (BITS == 8) {
      for_constants<GROUPS>([&](auto group) __attribute__((always_inline)) {
        use(group, load_part(numbers + group * PANEL_ROW_BYTES, part));
      });
    } else {
      WordPart upper = {};
      if constexpr (HAS_UPPER_BITS) upper = load_part(numbers, part), numbers += PANEL_ROW_BYTES;
      for_constants<HALF>([&](auto group) __attribute__((always_inline)) {
        const WordPart both = load_part(numbers + group * PANEL_ROW_BYTES, part);
        use(group, join_bits<group>(both, upper));
        use(std::integral_constant<int, group + HALF>{}, join_bits<group + HALF>(both >> NIBBLE_BITS, upper));
      });
    }
  }

 private:
  // Returns the low nibbles of `nibbles` with the group's upper bits.
  template <int G>
  static inline __attribute__((always_inline)) WordPart join_bits(WordPart nibbles, WordPart upper) {
    nibbles &= 0x0f0f0f0fu;
    if constexpr (HAS_UPPER_BITS) {
      constexpr uint32_t MASK = ((1u << BITS) - (1u << NIBBLE_BITS)) * 0x01010101u;
      constexpr int SHIFT = NIBBLE_BITS - G * UPPER_BITS;
      if constexpr (SHIFT >= 0) return nibbles | (upper << SHIFT & MASK);
      if constexpr (SHIFT < 0) return nibbles | (upper >> -SHIFT & MASK);
    }
    return nibbles;
  }
};

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

// Writes the weights of an output. Products of a scale and a number are exact in float32, so fused additions change
// nothing.
template <typename T>
void unpack_block_row(const Linear& weight, int64_t output, T* out) {
  const int64_t lane = output % PANEL, inputs = weight.block_inputs, num_words = inputs / GROUP_BYTES;
  const int64_t num_upper_bits = weight.block_bits < 8 ? weight.block_bits - NIBBLE_BITS : 0;
  const char* block = panel_blocks(weight, output / PANEL);
  const auto half = [&](int64_t index) {
    uint16_t value;
    std::memcpy(&value, block + (index * PANEL + lane) * sizeof(value), sizeof(value));
    return half_to_float(value);
  };
  for (int64_t first = 0; first < weight.num_inputs; first += inputs, block += block_bytes(weight)) {
    const float scale = half(0), minimum = weight.has_minimums ? half(1) : 0.0f;
    const char* words = block + PANEL_HALVES_BYTES * (weight.has_minimums ? 2 : 1) + lane * GROUP_BYTES;
    const auto byte = [&](int64_t word, int64_t i) {
      return static_cast<int>(static_cast<uint8_t>(words[word * PANEL_ROW_BYTES + i]));
    };
    for (int64_t word = 0; word < num_words; ++word) {
      for (int64_t i = 0; i < GROUP_BYTES; ++i) {
        int number;
        if (weight.block_bits == 8) {
          number = byte(word, i);
        } else {
          const int64_t at = word % (num_words / 2) + (num_upper_bits > 0);
          number = byte(at, i) >> (word < num_words / 2 ? 0 : NIBBLE_BITS) & 15;
          if (num_upper_bits > 0) {
            number |= (byte(0, i) >> word * num_upper_bits & ((1 << num_upper_bits) - 1)) << NIBBLE_BITS;
          }
        }
        const float value = scale * static_cast<float>(number - block_zero(weight)) + minimum;
        out[first + word * GROUP_BYTES + i] = from_float<T>(value);
      }
    }
  }
}
