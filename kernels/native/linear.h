// Products with a weight that was laid out for it.
//
// The weight [N, K] lies in panels of 64 outputs: for each group of inputs (see lanes.h) 64 outputs' groups side by
// side, so that one pass over a panel reads memory in order. Outputs beyond N are zero.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "lanes.h"
#include "parallel.h"

constexpr int PANEL_VECTORS = 4;
constexpr int PANEL = PANEL_VECTORS * LANES;
// Rows that share a reading of a panel: as long as the panel stays in the cache, more gain little.
constexpr int64_t ROWS_PER_ITEM = 96;

// As kernels/decoder has it, too.
struct Linear {
  const void* packed;
  const float* bias;       // as many as the panels have outputs, or null
  const float* scales;     // of each output's weights, which are then bytes with signs; null where they are of the dtype
  const int32_t* offsets;  // what an output's sum is too large, since inputs are counted from 128
  int64_t num_inputs, num_outputs;
};

constexpr int BYTE_ZERO = 128, BYTE_RANGE = 127;

// Rows of bytes without signs, and the step of each row.
struct QuantizedRows {
  const uint8_t* values;
  const float* steps;
};

template <typename T>
void quantize_row(const T* row, uint8_t* out, float* step, int64_t size) {
  float largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::fabs(to_float(row[i])));
  *step = largest / BYTE_RANGE;
  const float factor = largest > 0 ? BYTE_RANGE / largest : 0.0f;
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    out[i] = static_cast<uint8_t>(static_cast<int32_t>(std::nearbyint(to_float(row[i]) * factor)) + BYTE_ZERO);
  }
}

template <typename T>
QuantizedRows quantize_rows(const T* rows, int64_t stride, int64_t num_rows, int64_t size) {
  static thread_local std::vector<uint8_t> values;
  static thread_local std::vector<float> steps;
  if (static_cast<int64_t>(values.size()) < num_rows * size) values.resize(num_rows * size);
  if (static_cast<int64_t>(steps.size()) < num_rows) steps.resize(num_rows);
  const QuantizedRows made{values.data(), steps.data()};
  uint8_t* to = values.data();
  float* step = steps.data();
  for_ranges(num_rows, 8, [&](int64_t start, int64_t end) {
    for (int64_t row = start; row < end; ++row) quantize_row(rows + row * stride, to + row * size, step + row, size);
  });
  return made;
}

// The products of some rows with V vectors of a panel; In is T, or uint8_t where rows and weights are bytes.
template <typename T, typename In, typename Out, int V>
struct PanelRows {
  static constexpr bool IS_QUANTIZED = sizeof(In) == 1;
  using Sum = std::conditional_t<IS_QUANTIZED, Ints, Floats>;

  const In* inputs;
  int64_t input_stride;
  const char* columns;
  int64_t num_groups;
  const float *steps, *scales, *bias;
  const int32_t* offsets;
  Out* out;
  int64_t out_stride, num_outputs;

  template <int M>
  void run(int64_t row) const {
    Sum sums[M][V];
    const char* starts[V];
    for (int v = 0; v < V; ++v) {
      const Sum start = start_of(v);
      for (int m = 0; m < M; ++m) sums[m][v] = start;
      starts[v] = columns + v * VECTOR_BYTES;
    }
    accumulate<M, V>(sums, inputs + row * input_stride, input_stride, starts, PANEL * GROUP_BYTES, num_groups);
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V && v * LANES < num_outputs; ++v) {
        const Floats values = to_floats(sums[m][v], row + m, v);
        store_rounded<T>(out + (row + m) * out_stride + v * LANES, values, num_outputs - v * LANES);
      }
    }
  }

 private:
  template <typename Vector>
  static Vector load_vector(const void* from, int v) {
    Vector vector = {};
    if (from) std::memcpy(&vector, static_cast<const char*>(from) + v * VECTOR_BYTES, sizeof(vector));
    return vector;
  }

  Sum start_of(int v) const {
    if constexpr (IS_QUANTIZED) {
      return -load_vector<Ints>(offsets, v);
    } else {
      return load_vector<Floats>(bias, v);
    }
  }

  Floats to_floats(Sum sum, int64_t row, int v) const {
    if constexpr (IS_QUANTIZED) {
      const Floats steps_of_outputs = load_vector<Floats>(scales, v) * splat(steps[row]);
      return __builtin_convertvector(sum, Floats) * steps_of_outputs + load_vector<Floats>(bias, v);
    } else {
      return sum;
    }
  }
};

// In pieces of V vectors of outputs by rows_per_item rows.
template <typename T, int V, typename In, typename Out>
void multiply_pieces(const In* inputs, const float* steps, int64_t input_stride, const Linear& weight, Out* out,
                     int64_t out_stride, int64_t num_rows, int64_t rows_per_item) {
  constexpr int64_t WIDTH = V * LANES;
  const int64_t num_groups = weight.num_inputs / GROUP<In>;
  const int64_t num_blocks = (num_rows + rows_per_item - 1) / rows_per_item;
  for_each((weight.num_outputs + WIDTH - 1) / WIDTH * num_blocks, [&](int64_t item) {
    const int64_t first = item / num_blocks * WIDTH, row = item % num_blocks * rows_per_item;
    const char* panel = static_cast<const char*>(weight.packed) + first / PANEL * num_groups * PANEL * GROUP_BYTES;
    const PanelRows<T, In, Out, V> piece{inputs + row * input_stride,
                                         input_stride,
                                         panel + first % PANEL * GROUP_BYTES,
                                         num_groups,
                                         steps ? steps + row : nullptr,
                                         weight.scales ? weight.scales + first : nullptr,
                                         weight.bias ? weight.bias + first : nullptr,
                                         weight.offsets ? weight.offsets + first : nullptr,
                                         out + row * out_stride + first,
                                         out_stride,
                                         weight.num_outputs - first};
    for_row_tiles<TILE_ROWS>(std::min(rows_per_item, num_rows - row), piece);
  });
}

// Cuts the work into as many pieces as keep all threads busy to the end: of fewer rows while there are many, else of
// fewer outputs.
template <typename T, typename In, typename Out>
void multiply_in_pieces(const In* inputs, const float* steps, int64_t input_stride, const Linear& weight, Out* out,
                        int64_t out_stride, int64_t num_rows) {
  const int64_t wanted = num_threads() == 1 ? 1 : 8 * num_threads();
  const auto num_pieces = [&](int64_t vectors, int64_t rows) {
    return (weight.num_outputs / (vectors * LANES) + 1) * ((num_rows + rows - 1) / rows);
  };
  int64_t rows = ROWS_PER_ITEM;
  while (rows > 4 * TILE_ROWS && num_pieces(TILE_VECTORS, rows) < wanted) rows /= 2;
  if (num_rows > 2 * TILE_ROWS || num_pieces(TILE_VECTORS, rows) >= wanted) {
    multiply_pieces<T, TILE_VECTORS>(inputs, steps, input_stride, weight, out, out_stride, num_rows, rows);
  } else {
    multiply_pieces<T, 1>(inputs, steps, input_stride, weight, out, out_stride, num_rows, rows);
  }
}

// out = inputs times the weight, plus the bias, rounded once to T; written as Out, which is T or float.
template <typename T, typename Out>
void multiply(const T* inputs, int64_t input_stride, const Linear& weight, Out* out, int64_t out_stride,
              int64_t num_rows) {
  if (weight.scales) {
    const QuantizedRows rows = quantize_rows(inputs, input_stride, num_rows, weight.num_inputs);
    multiply_in_pieces<T>(rows.values, rows.steps, weight.num_inputs, weight, out, out_stride, num_rows);
  } else {
    multiply_in_pieces<T>(inputs, nullptr, input_stride, weight, out, out_stride, num_rows);
  }
}
