// Packs weights into the layouts of panels.h and nibbles.h.
#include "weights/nibbles.h"

namespace {

// Fills a panel with put(output, input), in the order of the layout: group by group, output by output.
template <typename Element, typename Put>
void pack_panel(Element* packed, int64_t panel, int64_t num_outputs, int64_t num_inputs, const Put& put) {
  Element* to = packed + panel * num_inputs * PANEL;
  for (int64_t group = 0; group < num_inputs; group += GROUP<Element>) {
    for (int64_t output = panel * PANEL; output < (panel + 1) * PANEL; ++output) {
      for (int g = 0; g < GROUP<Element>; ++g) *to++ = output < num_outputs ? put(output, group + g) : Element{0};
    }
  }
}

template <typename T>
void pack(const T* weight, T* packed, int64_t num_outputs, int64_t num_inputs) {
  for_each((num_outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
    pack_panel(packed, panel, num_outputs, num_inputs,
               [&](int64_t output, int64_t input) { return weight[output * num_inputs + input]; });
  });
}

template <typename T>
float largest_magnitude(const T* row, int64_t size) {
  float largest = 0;
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::fabs(to_float(row[i])));
  return largest;
}

// Writes a row as bytes; returns the offset to subtract from sums with it.
int32_t quantize_to_bytes(const float* row, float step, int64_t size, int8_t* out) {
  int32_t sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    out[i] = static_cast<int8_t>(step > 0 ? std::nearbyint(row[i] / step) : 0);
    sum += out[i];
  }
  return BYTE_ZERO * sum;
}

template <typename T>
void quantize(const T* weight, int8_t* packed, float* scales, int32_t* offsets, int64_t num_outputs,
              int64_t num_inputs) {
  for_each((num_outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
    const int64_t first = panel * PANEL, end = std::min(first + PANEL, num_outputs);
    std::vector<float> rotated(num_inputs);
    std::vector<int8_t> rows(PANEL * num_inputs);
    for (int64_t output = first; output < end; ++output) {
      rotate_row(weight + output * num_inputs, rotated.data(), num_inputs);
      scales[output] = largest_magnitude(rotated.data(), num_inputs) / BYTE_RANGE;
      int8_t* to = rows.data() + (output - first) * num_inputs;
      offsets[output] = quantize_to_bytes(rotated.data(), scales[output], num_inputs, to);
    }
    pack_panel(packed, panel, num_outputs, num_inputs,
               [&](int64_t output, int64_t input) { return rows[(output - first) * num_inputs + input]; });
  });
}

// Part of a row of weights that shares a step and a zero, in units of the output's scale.
class NibbleBlock {
 public:
  // importance: of the error of each input.
  NibbleBlock(const float* weights, const float* importance, int size)
      : weights_(weights), importance_(importance), size_(size) {
    for (int i = 0; i < size; ++i) {
      lowest_ = std::min(lowest_, weights[i]);
      highest_ = std::max(highest_, weights[i]);
    }
  }

  // Tries the smallest step that covers the range, and the next smaller one, which clips outliers for a finer
  // resolution; each with the two zeros nearest to the lowest weight.
  void choose() {
    const float covering = std::ceil((highest_ - lowest_) / NIBBLE_RANGE);
    for (int less = 0; less < 2; ++less) {
      const int step = std::clamp(static_cast<int>(covering) - less, 1, NIBBLE_RANGE);
      const int zero = std::min(static_cast<int>(-lowest_ / step), NIBBLE_RANGE);
      try_step(step, zero);
      try_step(step, std::min(zero + 1, NIBBLE_RANGE));
    }
  }

  uint8_t header() const { return static_cast<uint8_t>(best_.zero << 4 | best_.step); }
  int nibble_of(float weight) const { return best_.nibble_of(weight); }
  int value_of(int nibble) const { return best_.step * (nibble - best_.zero); }

 private:
  struct Grid {
    int step = 0, zero = 0, least = 0, most = 0;
    float factor = 0;

    int nibble_of(float weight) const {
      return std::max(least, std::min(most, static_cast<int>(std::nearbyint(weight * factor)) + zero));
    }
  };

  void try_step(int step, int zero) {
    // The products must fit into a byte, too.
    const Grid grid{step, zero, std::max(0, zero - (BYTE_RANGE + 1) / step),
                    std::min(NIBBLE_RANGE, zero + BYTE_RANGE / step), 1.0f / static_cast<float>(step)};
    float error = 0;
#pragma omp simd reduction(+ : error)
    for (int i = 0; i < size_; ++i) {
      const float difference = weights_[i] - static_cast<float>(step * (grid.nibble_of(weights_[i]) - zero));
      error += importance_[i] * difference * difference;
    }
    if (error >= error_) return;
    error_ = error, best_ = grid;
  }

  const float *weights_, *importance_;
  int size_;
  float lowest_ = 0, highest_ = 0, error_ = INFINITY;
  Grid best_;
};

// Returns the scale of an output, so that the largest weight fits into a byte, and the widest block into nibbles with
// the largest step.
float nibble_scale(const float* row, int64_t size) {
  float widest = 0;
  for (int64_t start = 0; start < size; start += BLOCK_INPUTS) {
    float lowest = 0, highest = 0;
    for (int64_t i = start; i < std::min(start + BLOCK_INPUTS, size); ++i) {
      lowest = std::min(lowest, row[i]);
      highest = std::max(highest, row[i]);
    }
    widest = std::max(widest, highest - lowest);
  }
  return std::max(largest_magnitude(row, size) / BYTE_RANGE, widest / (NIBBLE_RANGE * NIBBLE_RANGE));
}

// Rows whose feedback is computed together, so that a coefficient is read once for all of them.
constexpr int FED_ROWS = 4;

// Quantizes FED_ROWS rows to four bits, block by block. The error of an input moves the later inputs of its row by the
// coefficients of feedback, so that the errors of a product compensate each other.
class NibbleRows {
 public:
  // feedback: [num_inputs, num_inputs], row i has the coefficients of the error of input i, and on the diagonal the
  // importance of that error; null for no feedback.
  NibbleRows(const float* feedback, int64_t num_inputs)
      : feedback_(feedback),
        num_inputs_(num_inputs),
        weights_(FED_ROWS * padded_inputs(num_inputs)),
        errors_(weights_.size()) {}

  // Returns the buffer for a row.
  float* row(int number) { return weights_.data() + number * padded_inputs(num_inputs_); }

  // Packs the rows, in units of their scales, as outputs of a zeroed panel from `place` on, and adds to their sums.
  void pack(int num_rows, uint8_t* panel, int64_t place, int32_t* sums) {
    for (int64_t start = 0; start < num_inputs_; start += BLOCK_INPUTS, panel += BLOCK_BYTES) {
      const int size = static_cast<int>(std::min<int64_t>(BLOCK_INPUTS, num_inputs_ - start));
      Floats moved[FED_ROWS][BLOCK_INPUTS / LANES];
      move_block(start, moved);
      for (int r = 0; r < num_rows; ++r) {
        float block[BLOCK_INPUTS];
        std::memcpy(block, moved[r], sizeof(block));
        sums[r] += pack_block(r, block, start, size, panel, place + r);
      }
    }
  }

 private:
  // Writes the weights of a block, moved by the errors of all blocks before it.
  void move_block(int64_t start, Floats (&moved)[FED_ROWS][BLOCK_INPUTS / LANES]) const {
    const int64_t stride = padded_inputs(num_inputs_);
    for (int r = 0; r < FED_ROWS; ++r) std::memcpy(moved[r], weights_.data() + r * stride + start, sizeof(moved[r]));
    for (int64_t i = 0; feedback_ && i < start; ++i) {
      Floats coefficients[BLOCK_INPUTS / LANES];
      std::memcpy(coefficients, feedback_ + i * num_inputs_ + start, sizeof(coefficients));
      for (int r = 0; r < FED_ROWS; ++r) {
        const Floats error = splat(errors_[r * stride + i]);
        for (int v = 0; v < BLOCK_INPUTS / LANES; ++v) moved[r][v] += error * coefficients[v];
      }
    }
  }

  // Returns the sum of the block's values.
  int32_t pack_block(int r, float* block, int64_t start, int size, uint8_t* panel, int64_t place) {
    float importance[BLOCK_INPUTS];
    for (int i = 0; i < size; ++i) importance[i] = feedback_ ? feedback_[(start + i) * (num_inputs_ + 1)] : 1.0f;
    NibbleBlock nibbles(block, importance, size);
    nibbles.choose();
    panel[header_offset(place)] = nibbles.header();
    const float* weights = row(r) + start;
    int32_t sum = 0;
    for (int i = 0; i < BLOCK_INPUTS; ++i) {
      const int nibble = nibbles.nibble_of(i < size ? block[i] : 0.0f), group = i / GROUP<uint8_t>;
      sum += nibbles.value_of(nibble);
      uint8_t* to = panel + PANEL + group / 2 * PANEL_ROW_BYTES + place * GROUP<uint8_t> + i % GROUP<uint8_t>;
      *to = static_cast<uint8_t>(*to | nibble << (group % 2 * 4));
      if (!feedback_ || i >= size) continue;
      const float error = weights[i] - static_cast<float>(nibbles.value_of(nibble));
      errors_[r * padded_inputs(num_inputs_) + start + i] = error;
      const float* coefficients = feedback_ + (start + i) * num_inputs_ + start;
#pragma omp simd
      for (int later = i + 1; later < size; ++later) block[later] += error * coefficients[later];
    }
    return sum;
  }

  const float* feedback_;
  int64_t num_inputs_;
  std::vector<float> weights_, errors_;
};

template <typename T>
void quantize_to_nibbles(const T* weight, const float* feedback, uint8_t* packed, float* scales, int32_t* offsets,
                         int64_t num_outputs, int64_t num_inputs) {
  const int64_t num_blocks = padded_inputs(num_inputs) / BLOCK_INPUTS;
  std::memset(packed, 0, (num_outputs + PANEL - 1) / PANEL * num_blocks * BLOCK_BYTES);
  for_ranges(num_outputs, PANEL, [&](int64_t start, int64_t end) {
    NibbleRows rows(feedback, num_inputs);
    uint8_t* panel = packed + start / PANEL * num_blocks * BLOCK_BYTES;
    for (int64_t first = start; first < end; first += FED_ROWS) {
      const int num_rows = static_cast<int>(std::min<int64_t>(FED_ROWS, end - first));
      int32_t sums[FED_ROWS] = {};
      for (int r = 0; r < num_rows; ++r) {
        float* row = rows.row(r);
        rotate_row(weight + (first + r) * num_inputs, row, num_inputs);
        const float scale = scales[first + r] = nibble_scale(row, num_inputs);
        for (int64_t i = 0; i < num_inputs; ++i) row[i] = scale > 0 ? row[i] / scale : 0.0f;
      }
      rows.pack(num_rows, panel, first % PANEL, sums);
      for (int r = 0; r < num_rows; ++r) offsets[first + r] = BYTE_ZERO * sums[r];
    }
  });
}

}  // namespace

// packed: ceil(N / 64) panels of K * 64 elements; K is a multiple of the group. scales and offsets have an element per
// output of the panels. feedback: see NibbleRows. rotate_rows writes rows of size floats.
#define PENSTOCK_PACKING(T, suffix)                                                                                  \
  extern "C" void pack_linear_##suffix(const T* weight, T* packed, int64_t num_outputs, int64_t num_inputs) {        \
    pack<T>(weight, packed, num_outputs, num_inputs);                                                                \
  }                                                                                                                  \
  extern "C" void quantize_linear_##suffix(const T* weight, int8_t* packed, float* scales, int32_t* offsets,         \
                                           int64_t num_outputs, int64_t num_inputs) {                                \
    quantize<T>(weight, packed, scales, offsets, num_outputs, num_inputs);                                           \
  }                                                                                                                  \
  extern "C" void quantize_linear_to_nibbles_##suffix(const T* weight, const float* feedback, uint8_t* packed,       \
                                                      float* scales, int32_t* offsets, int64_t num_outputs,          \
                                                      int64_t num_inputs) {                                          \
    quantize_to_nibbles<T>(weight, feedback, packed, scales, offsets, num_outputs, num_inputs);                      \
  }                                                                                                                  \
  extern "C" void rotate_rows_##suffix(const T* rows, float* rotated, int64_t num_rows, int64_t size) {              \
    for_ranges(num_rows, 8, [&](int64_t start, int64_t end) {                                                        \
      for (int64_t row = start; row < end; ++row) rotate_row(rows + row * size, rotated + row * size, size);         \
    });                                                                                                              \
  }

PENSTOCK_PACKING(float, float32)
PENSTOCK_PACKING(bfloat16, bfloat16)
