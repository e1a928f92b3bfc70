// Weights of four bits, which become the bytes of panels.h as they are read.
//
// 32 inputs of an output have a step, 0 to 15, and a zero, 0 to 15: a weight is step * (nibble - zero), a byte with a
// sign, in units of the output's scale. So the sum of an output's products is a whole number whatever its order, scaled
// once, as with bytes: products on vectors and on tile registers have the same bits.
//
// A panel is, block of 32 inputs by block: a byte for each of the 64 outputs, the step and above it the zero, so that
// those of the outputs l, l + 16, l + 32 and l + 48 are a word, lane l of a vector; then the nibbles, two groups of
// inputs to 256 bytes in the order of a panel of bytes, the second group above the first. Inputs are filled up to whole
// steps of a tile; what is filled up has the step 0.
#pragma once
#include "panels.h"

constexpr int NIBBLE_RANGE = 15;
constexpr int BLOCK_INPUTS = 32;
constexpr int BLOCK_PAIRS = BLOCK_INPUTS / GROUP<uint8_t> / 2;  // of groups
constexpr int BLOCK_BYTES = PANEL + BLOCK_PAIRS * PANEL_ROW_BYTES;
constexpr int NIBBLE_INPUTS_MULTIPLE = 64;
// What is asked for of a panel beforehand: as much as comes from memory while a line is on its way.
constexpr int NIBBLE_BYTES_AHEAD = 8 * BLOCK_BYTES;

inline int64_t padded_inputs(int64_t num_inputs) {
  return (num_inputs + NIBBLE_INPUTS_MULTIPLE - 1) / NIBBLE_INPUTS_MULTIPLE * NIBBLE_INPUTS_MULTIPLE;
}

// Where the head of an output is in a block, by its place in the panel.
inline int64_t place_of_head(int64_t place) { return place % LANES * PANEL_VECTORS + place / LANES; }

inline const char* nibbles_of_panel(const Linear& weight, int64_t panel) {
  const int64_t num_blocks = padded_inputs(weight.num_inputs) / BLOCK_INPUTS;
  return static_cast<const char*>(weight.packed) + panel * num_blocks * BLOCK_BYTES;
}

// Of a part of 16 outputs for a block of inputs: the steps, and what the zeros amount to.
struct NibbleSteps {
  HalfPart steps;
  BytePart zeros;

  // Of a part of the v-th vector of outputs in the panel that the block belongs to.
  static NibbleSteps of(const char* block, int v, int part) {
    const WordPart heads = load_part(block, part) >> (8 * v), step = heads & 0xf;
    const WordPart zero = (WordPart)((HalfPart)step * (HalfPart)(heads >> 4 & 0xf));
    return {(HalfPart)in_both_halves(step), (BytePart)in_all_bytes(zero)};
  }

  // The bytes of two groups of inputs. A product of a step and a nibble fits into a byte, so two of them are made in
  // one of 16 bits.
  void unpack(WordPart nibbles, WordPart& first, WordPart& second) const {
    first = (WordPart)((BytePart)((HalfPart)(nibbles & 0x0f0f0f0fu) * steps) - zeros);
    second = (WordPart)((BytePart)((HalfPart)(nibbles >> 4 & 0x0f0f0f0fu) * steps) - zeros);
  }
};

// Writes the bytes of a block, as a panel of bytes has them, for num_vectors of its vectors of outputs from the first on.
inline void unpack_block(const char* block, int first, int num_vectors, char* to) {
  for (int v = first; v < first + num_vectors; ++v) {
    for (int part = 0; part < PARTS; ++part) {
      const NibbleSteps steps = NibbleSteps::of(block, v, part);
      const char* nibbles = block + PANEL + v * VECTOR_BYTES;
      char* rows = to + v * VECTOR_BYTES + part * PART_BYTES;
      for (int pair = 0; pair < BLOCK_PAIRS; ++pair, nibbles += PANEL_ROW_BYTES, rows += 2 * PANEL_ROW_BYTES) {
        if (part == 0) __builtin_prefetch(nibbles + NIBBLE_BYTES_AHEAD);
        WordPart both[2];
        steps.unpack(load_part(nibbles, part), both[0], both[1]);
        std::memcpy(rows, &both[0], sizeof(both[0]));
        std::memcpy(rows + PANEL_ROW_BYTES, &both[1], sizeof(both[1]));
      }
    }
  }
}
