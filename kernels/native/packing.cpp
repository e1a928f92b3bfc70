// Packs weights into the layouts of panels.h and nibbles.h.
#include "nibbles.h"

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

// One block of an output's weights in units of the output's scale, and its quantization to four bits.
class NibbleBlock {
 public:
  template <typename T>
  NibbleBlock(const T* weights, int64_t size, float scale) {
    for (int64_t i = 0; i < size; ++i) {
      scaled_[i] = to_float(weights[i]) / scale;
      lowest_ = std::min(lowest_, scaled_[i]);
      highest_ = std::max(highest_, scaled_[i]);
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

  uint8_t header() const { return static_cast<uint8_t>(zero_ << 4 | step_); }
  uint8_t nibble(int i) const { return static_cast<uint8_t>(nibbles_[i]); }

  int32_t sum() const {
    int32_t sum = 0;
    for (int i = 0; i < BLOCK_INPUTS; ++i) sum += step_ * (nibbles_[i] - zero_);
    return sum;
  }

 private:
  void try_step(int step, int zero) {
    // The products must fit into a byte, too.
    const int least = std::max(0, zero - (BYTE_RANGE + 1) / step);
    const int most = std::min(NIBBLE_RANGE, zero + BYTE_RANGE / step);
    int32_t nibbles[BLOCK_INPUTS];
    float error = 0;
    const float factor = 1.0f / step;
#pragma omp simd reduction(+ : error)
    for (int i = 0; i < BLOCK_INPUTS; ++i) {
      const int near = static_cast<int>(std::nearbyint(scaled_[i] * factor)) + zero;
      nibbles[i] = std::max(least, std::min(most, near));
      const float difference = scaled_[i] - static_cast<float>(step * (nibbles[i] - zero));
      error += difference * difference;
    }
    if (error >= error_) return;
    error_ = error, step_ = step, zero_ = zero;
    std::copy(nibbles, nibbles + BLOCK_INPUTS, nibbles_);
  }

  float scaled_[BLOCK_INPUTS] = {};
  float lowest_ = 0, highest_ = 0, error_ = INFINITY;
  int step_ = 0, zero_ = 0;
  int32_t nibbles_[BLOCK_INPUTS] = {};
};

// Returns the scale of an output, so that the largest weight fits into a byte, and the widest block into nibbles with
// the largest step.
template <typename T>
float nibble_scale(const T* row, int64_t size) {
  float widest = 0;
  for (int64_t start = 0; start < size; start += BLOCK_INPUTS) {
    float lowest = 0, highest = 0;
    for (int64_t i = start; i < std::min(start + BLOCK_INPUTS, size); ++i) {
      lowest = std::min(lowest, to_float(row[i]));
      highest = std::max(highest, to_float(row[i]));
    }
    widest = std::max(widest, highest - lowest);
  }
  return std::max(largest_magnitude(row, size) / BYTE_RANGE, widest / (NIBBLE_RANGE * NIBBLE_RANGE));
}

// Packs an output's weights into a zeroed panel, as output `place`; returns the offset to subtract from its sums.
template <typename T>
int32_t pack_nibbles(const T* row, int64_t size, float scale, uint8_t* panel, int64_t place) {
  int32_t offset = 0;
  if (scale == 0) return offset;
  for (int64_t start = 0; start < size; start += BLOCK_INPUTS, panel += BLOCK_BYTES) {
    NibbleBlock block(row + start, std::min<int64_t>(BLOCK_INPUTS, size - start), scale);
    block.choose();
    offset += BYTE_ZERO * block.sum();
    panel[header_offset(place)] = block.header();
    for (int i = 0; i < BLOCK_INPUTS; ++i) {
      const int group = i / GROUP<uint8_t>;
      uint8_t* to = panel + PANEL + group / 2 * PANEL_ROW_BYTES + place * GROUP<uint8_t> + i % GROUP<uint8_t>;
      *to = static_cast<uint8_t>(*to | block.nibble(i) << (group % 2 * 4));
    }
  }
  return offset;
}

template <typename T>
void quantize_to_nibbles(const T* weight, uint8_t* packed, float* scales, int32_t* offsets, int64_t num_outputs,
                         int64_t num_inputs) {
  const int64_t num_blocks = padded_inputs(num_inputs) / BLOCK_INPUTS;
  std::memset(packed, 0, (num_outputs + PANEL - 1) / PANEL * num_blocks * BLOCK_BYTES);
  for_ranges(num_outputs, PANEL, [&](int64_t start, int64_t end) {
    for (int64_t output = start; output < end; ++output) {
      uint8_t* panel = packed + output / PANEL * num_blocks * BLOCK_BYTES;
      scales[output] = nibble_scale(weight + output * num_inputs, num_inputs);
      offsets[output] = pack_nibbles(weight + output * num_inputs, num_inputs, scales[output], panel, output % PANEL);
    }
  });
}

}  // namespace

// packed: ceil(N / 64) panels of K * 64 elements; K is a multiple of the group. scales and offsets have an element per
// output of the panels.
#define PENSTOCK_PACKING(T, suffix)                                                                                  \
  extern "C" void pack_linear_##suffix(const T* weight, T* packed, int64_t num_outputs, int64_t num_inputs) {        \
    pack<T>(weight, packed, num_outputs, num_inputs);                                                                \
  }                                                                                                                  \
  extern "C" void quantize_linear_##suffix(const T* weight, int8_t* packed, float* scales, int32_t* offsets,         \
                                           int64_t num_outputs, int64_t num_inputs) {                                \
    quantize<T>(weight, packed, scales, offsets, num_outputs, num_inputs);                                           \
  }                                                                                                                  \
  extern "C" void quantize_linear_to_nibbles_##suffix(const T* weight, uint8_t* packed, float* scales,               \
                                                      int32_t* offsets, int64_t num_outputs, int64_t num_inputs) {   \
    quantize_to_nibbles<T>(weight, packed, scales, offsets, num_outputs, num_inputs);                                \
  }

PENSTOCK_PACKING(float, float32)
PENSTOCK_PACKING(bfloat16, bfloat16)
