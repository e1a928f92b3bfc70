// Initial values and final processing of the sums of a product, for all kinds of registers.
#pragma once
#include <type_traits>

#include "weights/panels.h"

// Results of the rows and outputs from a first row and a first output on. In is T, or uint8_t for quantized rows and
// weights, whose sums are integers and are scaled by the scales of row and output. Results are rounded once to T, and
// written as Out, which is T or float.
template <typename T, typename In, typename Out>
struct Results {
  static constexpr bool ARE_QUANTIZED = sizeof(In) == 1;
  using Sum = std::conditional_t<ARE_QUANTIZED, Ints, Floats>;

  const float *steps, *scales, *bias;
  const int32_t* offsets;
  Out* out;
  int64_t out_stride, num_outputs;

  // Results of all rows of a product with weight; out is [num_rows, out_stride].
  static Results for_product(const float* steps, const Linear& weight, Out* out, int64_t out_stride) {
    return {steps, weight.scales, weight.bias, weight.offsets, out, out_stride, weight.num_outputs};
  }

  Results at(int64_t row, int64_t output) const {
    return {steps ? steps + row : nullptr,
            scales ? scales + output : nullptr,
            bias ? bias + output : nullptr,
            offsets ? offsets + output : nullptr,
            out + row * out_stride + output,
            out_stride,
            num_outputs - output};
  }

  // Initial sum of the v-th vector of outputs.
  Sum initial_sum(int v) const {
    if constexpr (ARE_QUANTIZED) {
      return -load<Ints>(offsets, v);
    } else {
      return load<Floats>(bias, v);
    }
  }

  void write(Sum sum, int64_t row, int v) const {
    store_rounded<T>(out + row * out_stride + v * LANES, to_floats(sum, row, v), num_outputs - v * LANES);
  }

  // Writes the sums of M rows, from a row on.
  template <int M, int V>
  inline __attribute__((always_inline)) void write_rows(const Sums<Sum, M, V>& sums, int64_t row) const {
    const Results own = *this;  // which no write can change, so that its members stay in registers
    for_constants<V>([&](auto v) __attribute__((always_inline)) {
      if (v * LANES >= own.num_outputs) return;
      for_constants<M>([&](auto m) __attribute__((always_inline)) { own.write(sums.get(m, v), row + m, v); });
    });
  }

 private:
  template <typename Vector>
  static Vector load(const void* source, int v) {
    Vector vector = {};
    if (source) std::memcpy(&vector, static_cast<const char*>(source) + v * VECTOR_BYTES, sizeof(vector));
    return vector;
  }

  Floats to_floats(Sum sum, int64_t row, int v) const {
    if constexpr (ARE_QUANTIZED) {
      const Floats steps_of_outputs = load<Floats>(scales, v) * splat(steps[row]);
      return __builtin_convertvector(sum, Floats) * steps_of_outputs + load<Floats>(bias, v);
    } else {
      return sum;
    }
  }
};
