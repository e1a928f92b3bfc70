// The layouts of a weight: see panels.h and nibbles.h.
#include "nibbles.h"

namespace {

// Calls put(panel, output) for the elements of a panel in the order of the layout: group by group, output by output.
template <typename Element, typename Put>
void pack_panels(Element* packed, int64_t num_outputs, int64_t num_inputs, const Put& put) {
  for_each((num_outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
    Element* to = packed + panel * num_inputs * PANEL;
    for (int64_t group = 0; group < num_inputs; group += GROUP<Element>) {
      for (int64_t output = panel * PANEL; output < (panel + 1) * PANEL; ++output) {
        for (int g = 0; g < GROUP<Element>; ++g) *to++ = output < num_outputs ? put(output, group + g) : Element{0};
      }
    }
  });
}

template <typename T>
void pack(const T* weight, T* packed, int64_t num_outputs, int64_t num_inputs) {
  pack_panels(packed, num_outputs, num_inputs,
              [&](int64_t output, int64_t input) { return weight[output * num_inputs + input]; });
}

template <typename T>
float largest_of(const T* row, int64_t size) {
  float largest = 0;
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::fabs(to_float(row[i])));
  return largest;
}

template <typename T>
void quantize(const T* weight, int8_t* packed, float* scales, int32_t* offsets, int64_t num_outputs,
              int64_t num_inputs) {
  for_ranges(num_outputs, PANEL, [&](int64_t start, int64_t end) {
    for (int64_t output = start; output < end; ++output) {
      scales[output] = largest_of(weight + output * num_inputs, num_inputs) / BYTE_RANGE;
    }
  });
  const auto rounded = [&](int64_t output, int64_t input) {
    const float step = scales[output];
    return static_cast<int8_t>(step > 0 ? std::nearbyint(to_float(weight[output * num_inputs + input]) / step) : 0);
  };
  pack_panels(packed, num_outputs, num_inputs, rounded);
  for_ranges(num_outputs, PANEL, [&](int64_t start, int64_t end) {
    for (int64_t output = start; output < end; ++output) {
      int32_t sum = 0;
      for (int64_t i = 0; i < num_inputs; ++i) sum += rounded(output, i);
      offsets[output] = BYTE_ZERO * sum;
    }
  });
}

// An output's weights for a block of inputs, in units of the output's scale, and the four bits that are nearest.
class NibbleBlock {
 public:
  template <typename T>
  NibbleBlock(const T* weights, int64_t size, float scale) {
    for (int64_t i = 0; i < size; ++i) {
      wanted_[i] = to_float(weights[i]) / scale;
      lowest_ = std::min(lowest_, wanted_[i]);
      highest_ = std::max(highest_, wanted_[i]);
    }
  }

  // The smallest step that reaches everything, and the one below, which cuts off what lies farthest out for a finer
  // step elsewhere; with the zeros that reach the lowest weight, or nearly so.
  void choose() {
    const float reaching = std::ceil((highest_ - lowest_) / NIBBLE_RANGE);
    for (int less = 0; less < 2; ++less) {
      const int step = std::clamp(static_cast<int>(reaching) - less, 1, NIBBLE_RANGE);
      const int zero = std::min(static_cast<int>(-lowest_ / step), NIBBLE_RANGE);
      try_out(step, zero);
      try_out(step, std::min(zero + 1, NIBBLE_RANGE));
    }
  }

  uint8_t head() const { return static_cast<uint8_t>(zero_ << 4 | step_); }
  uint8_t nibble(int i) const { return static_cast<uint8_t>(nibbles_[i]); }

  int32_t sum() const {
    int32_t sum = 0;
    for (int i = 0; i < BLOCK_INPUTS; ++i) sum += step_ * (nibbles_[i] - zero_);
    return sum;
  }

 private:
  void try_out(int step, int zero) {
    // Bytes have an end, too.
    const int least = std::max(0, zero - (BYTE_RANGE + 1) / step);
    const int most = std::min(NIBBLE_RANGE, zero + BYTE_RANGE / step);
    int32_t nibbles[BLOCK_INPUTS];
    float error = 0;
    const float factor = 1.0f / step;
#pragma omp simd reduction(+ : error)
    for (int i = 0; i < BLOCK_INPUTS; ++i) {
      const int near = static_cast<int>(std::nearbyint(wanted_[i] * factor)) + zero;
      nibbles[i] = std::max(least, std::min(most, near));
      const float missed = wanted_[i] - static_cast<float>(step * (nibbles[i] - zero));
      error += missed * missed;
    }
    if (error >= error_) return;
    error_ = error, step_ = step, zero_ = zero;
    std::copy(nibbles, nibbles + BLOCK_INPUTS, nibbles_);
  }

  float wanted_[BLOCK_INPUTS] = {};
  float lowest_ = 0, highest_ = 0, error_ = INFINITY;
  int step_ = 0, zero_ = 0;
  int32_t nibbles_[BLOCK_INPUTS] = {};
};

// Of an output's weights: so that the largest fits into a byte, and the widest block into its nibbles with the largest
// step.
template <typename T>
float scale_of_nibbles(const T* row, int64_t size) {
  float widest = 0;
  for (int64_t start = 0; start < size; start += BLOCK_INPUTS) {
    float lowest = 0, highest = 0;
    for (int64_t i = start; i < std::min(start + BLOCK_INPUTS, size); ++i) {
      lowest = std::min(lowest, to_float(row[i]));
      highest = std::max(highest, to_float(row[i]));
    }
    widest = std::max(widest, highest - lowest);
  }
  return std::max(largest_of(row, size) / BYTE_RANGE, widest / (NIBBLE_RANGE * NIBBLE_RANGE));
}

// Puts an output's weights into its place of a panel of zeros; returns what its sums are too large.
template <typename T>
int32_t put_nibbles(const T* row, int64_t size, float scale, uint8_t* panel, int64_t place) {
  int32_t offset = 0;
  if (scale == 0) return offset;
  for (int64_t start = 0; start < size; start += BLOCK_INPUTS, panel += BLOCK_BYTES) {
    NibbleBlock block(row + start, std::min<int64_t>(BLOCK_INPUTS, size - start), scale);
    block.choose();
    offset += BYTE_ZERO * block.sum();
    panel[place_of_head(place)] = block.head();
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
      scales[output] = scale_of_nibbles(weight + output * num_inputs, num_inputs);
      offsets[output] = put_nibbles(weight + output * num_inputs, num_inputs, scales[output], panel, output % PANEL);
    }
  });
}

}  // namespace

// packed: ceil(N / 64) panels of K * 64; K is a multiple of the group. scales and offsets are as many as the panels
// have outputs.
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
