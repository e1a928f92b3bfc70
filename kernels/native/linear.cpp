// The layouts of a weight, and products with it. See linear.h.
#include "linear.h"

#include "tile_product.h"
#include "tiles.h"
#include "vector_product.h"

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
void quantize(const T* weight, int8_t* packed, float* scales, int32_t* offsets, int64_t num_outputs,
              int64_t num_inputs) {
  for_ranges(num_outputs, PANEL, [&](int64_t start, int64_t end) {
    for (int64_t output = start; output < end; ++output) {
      float largest = 0;
      for (int64_t i = 0; i < num_inputs; ++i) {
        largest = std::max(largest, std::fabs(to_float(weight[output * num_inputs + i])));
      }
      scales[output] = largest / BYTE_RANGE;
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

// On tile registers where there are some and the inputs fill them, else on vectors. A rule of the weight's shape alone:
// both round differently, and a row's bits are not to depend on how many others there are.
template <typename T, typename In, typename Out>
void multiply_rows(const In* inputs, int64_t input_stride, const Linear& weight, const Results<T, In, Out>& results,
                   int64_t num_rows) {
  if constexpr (tiles::EXIST && sizeof(In) < sizeof(float)) {
    if (tiles::are_given && weight.num_inputs * sizeof(In) % tiles::ROW_BYTES == 0) {
      return multiply_by_tiles(inputs, input_stride, weight, results, num_rows);
    }
  }
  multiply_by_vectors(inputs, input_stride, weight, results, num_rows);
}

}  // namespace

template <typename T, typename Out>
void multiply(const T* inputs, int64_t input_stride, const Linear& weight, Out* out, int64_t out_stride,
              int64_t num_rows) {
  if (weight.scales) {
    const QuantizedRows rows = quantize_rows(inputs, input_stride, num_rows, weight.num_inputs);
    multiply_rows(rows.values, weight.num_inputs, weight,
                  Results<T, uint8_t, Out>::of(rows.steps, weight, out, out_stride), num_rows);
  } else {
    multiply_rows(inputs, input_stride, weight, Results<T, T, Out>::of(nullptr, weight, out, out_stride), num_rows);
  }
}

template void multiply(const float*, int64_t, const Linear&, float*, int64_t, int64_t);
template void multiply(const bfloat16*, int64_t, const Linear&, bfloat16*, int64_t, int64_t);
template void multiply(const bfloat16*, int64_t, const Linear&, float*, int64_t, int64_t);

// packed: ceil(N / 64) panels of K * 64; K is a multiple of the group. scales and offsets are null, or those of
// quantize_linear, as many as the panels have outputs.
#define PENSTOCK_LINEAR(T, suffix)                                                                                  \
  extern "C" void pack_linear_##suffix(const T* weight, T* packed, int64_t num_outputs, int64_t num_inputs) {       \
    pack<T>(weight, packed, num_outputs, num_inputs);                                                               \
  }                                                                                                                 \
  extern "C" void quantize_linear_##suffix(const T* weight, int8_t* packed, float* scales, int32_t* offsets,        \
                                           int64_t num_outputs, int64_t num_inputs) {                               \
    quantize<T>(weight, packed, scales, offsets, num_outputs, num_inputs);                                          \
  }                                                                                                                 \
  extern "C" void linear_##suffix(const T* inputs, int64_t stride, const Linear* weight, T* out, int64_t num_rows) { \
    multiply<T, T>(inputs, stride, *weight, out, weight->num_outputs, num_rows);                                    \
  }

PENSTOCK_LINEAR(float, float32)
PENSTOCK_LINEAR(bfloat16, bfloat16)
