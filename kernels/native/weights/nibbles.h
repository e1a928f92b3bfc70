// Four-bit weights, which are unpacked to the bytes of panels.h when they are read.
//
// Weights are rotated first (rotation.h). Every 32 inputs of an output share a step and a zero, both 0 to 15. A weight
// is step * (nibble - zero), a signed byte in units of the output's scale. So an output's sum is an integer, independent
// of the order of additions, and scaled once, as for byte weights: products on vectors and on tile registers have the
// same bits.
//
// A panel consists of blocks of 32 inputs. A block has a header byte for each of the 64 outputs, with the step in the
// low bits and the zero in the high bits, ordered so that the headers of outputs l, l + 16, l + 32 and l + 48 form a
// word, lane l of a vector. Then follow the nibbles, two groups of inputs per 256 bytes in the order of a panel of
// bytes, the second group in the high bits. Inputs are padded to whole steps of a tile; padding has step 0.
#pragma once
#include "weights/panels.h"

constexpr int NIBBLE_RANGE = 15;
constexpr int BLOCK_INPUTS = 32;
constexpr int BLOCK_PAIRS = BLOCK_INPUTS / GROUP<uint8_t> / 2;  // pairs of groups
constexpr int BLOCK_BYTES = PANEL + BLOCK_PAIRS * PANEL_ROW_BYTES;
constexpr int NIBBLE_INPUTS_MULTIPLE = 64;
// Prefetch distance within a panel: the bytes that arrive during the latency of one line.
constexpr int NIBBLE_PREFETCH_BYTES = 8 * BLOCK_BYTES;

inline int64_t padded_inputs(int64_t num_inputs) {
  return (num_inputs + NIBBLE_INPUTS_MULTIPLE - 1) / NIBBLE_INPUTS_MULTIPLE * NIBBLE_INPUTS_MULTIPLE;
}

// Returns the offset of an output's header in a block, from its index in the panel.
inline int64_t header_offset(int64_t output) { return output % LANES * PANEL_VECTORS + output / LANES; }

inline const char* panel_nibbles(const Linear& weight, int64_t panel) {
  const int64_t num_blocks = padded_inputs(weight.num_inputs) / BLOCK_INPUTS;
  return static_cast<const char*>(weight.packed) + panel * num_blocks * BLOCK_BYTES;
}

// Steps and step * zero of a part of 16 outputs, for one block of inputs.
struct NibbleSteps {
  HalfPart steps;
  BytePart zeros;

  // Loads a part of the v-th vector of outputs.
  static NibbleSteps load(const char* block, int v, int part) {
    const WordPart headers = load_part(block, part) >> (8 * v), step = headers & 0xf;
    const WordPart zero = (WordPart)((HalfPart)step * (HalfPart)(headers >> 4 & 0xf));
    return {(HalfPart)in_both_halves(step), (BytePart)in_all_bytes(zero)};
  }

  // Unpacks the bytes of two groups of inputs. A product of a step and a nibble fits into a byte, so one product of 16
  // bits computes two of them.
  void unpack(WordPart nibbles, WordPart& first, WordPart& second) const {
    first = (WordPart)((BytePart)((HalfPart)(nibbles & 0x0f0f0f0fu) * steps) - zeros);
    second = (WordPart)((BytePart)((HalfPart)(nibbles >> 4 & 0x0f0f0f0fu) * steps) - zeros);
  }
};

// Writes the bytes of num_vectors vectors of outputs of a block, from vector first on, in the layout of a panel of
// bytes.
inline void unpack_block(const char* block, int first, int num_vectors, char* to) {
  for (int v = first; v < first + num_vectors; ++v) {
    for (int part = 0; part < PARTS; ++part) {
      const NibbleSteps steps = NibbleSteps::load(block, v, part);
      const char* nibbles = block + PANEL + v * VECTOR_BYTES;
      char* rows = to + v * VECTOR_BYTES + part * PART_BYTES;
      for (int pair = 0; pair < BLOCK_PAIRS; ++pair, nibbles += PANEL_ROW_BYTES, rows += 2 * PANEL_ROW_BYTES) {
        if (part == 0) __builtin_prefetch(nibbles + NIBBLE_PREFETCH_BYTES);
        WordPart both[2];
        steps.unpack(load_part(nibbles, part), both[0], both[1]);
        std::memcpy(rows, &both[0], sizeof(both[0]));
        std::memcpy(rows + PANEL_ROW_BYTES, &both[1], sizeof(both[1]));
      }
    }
  }
}
