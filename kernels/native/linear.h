// Products with a weight that was laid out for it.
//
// The weight [N, K] lies in panels of 64 outputs: for each group of inputs (see lanes.h) 64 outputs' groups side by
// side, so that one pass over a panel reads memory in order. Outputs beyond N are zero.
#pragma once
#include <algorithm>

#include "lanes.h"
#include "parallel.h"

constexpr int PANEL_VECTORS = 4;
constexpr int PANEL = PANEL_VECTORS * LANES;
// Rows that share a reading of a panel: as long as the panel stays in the cache, more gain little.
constexpr int64_t ROWS_PER_ITEM = 96;

// As decoder.py has it, too.
struct Linear {
  const void* packed;
  const float* bias;  // as many as the panels have outputs, or null
  int64_t num_inputs, num_outputs;
};

// The products of some rows with V vectors of a panel.
template <typename T, typename Out, int V>
struct PanelRows {
  const T* inputs;
  int64_t input_stride;
  const char* columns;
  int64_t num_groups;
  const float* bias;
  Out* out;
  int64_t out_stride, num_outputs;

  template <int M>
  void run(int64_t row) const {
    Floats sums[M][V];
    const char* starts[V];
    for (int v = 0; v < V; ++v) {
      Floats start = {};
      if (bias) std::memcpy(&start, bias + v * LANES, sizeof(start));
      for (int m = 0; m < M; ++m) sums[m][v] = start;
      starts[v] = columns + v * VECTOR_BYTES;
    }
    accumulate<T, M, V>(sums, inputs + row * input_stride, input_stride, starts, PANEL * GROUP_BYTES, num_groups);
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V && v * LANES < num_outputs; ++v) {
        store_rounded<T>(out + (row + m) * out_stride + v * LANES, sums[m][v], num_outputs - v * LANES);
      }
    }
  }
};

// In pieces of V vectors of outputs by rows_per_item rows.
template <typename T, typename Out, int V>
void multiply_pieces(const T* inputs, int64_t input_stride, const Linear& weight, Out* out, int64_t out_stride,
                     int64_t num_rows, int64_t rows_per_item) {
  constexpr int64_t WIDTH = V * LANES;
  const int64_t num_groups = weight.num_inputs / GROUP<T>;
  const int64_t num_blocks = (num_rows + rows_per_item - 1) / rows_per_item;
  for_each((weight.num_outputs + WIDTH - 1) / WIDTH * num_blocks, [&](int64_t item) {
    const int64_t first = item / num_blocks * WIDTH, row = item % num_blocks * rows_per_item;
    const char* panel = static_cast<const char*>(weight.packed) + first / PANEL * num_groups * PANEL * GROUP_BYTES;
    const PanelRows<T, Out, V> piece{inputs + row * input_stride,
                                     input_stride,
                                     panel + first % PANEL * GROUP_BYTES,
                                     num_groups,
                                     weight.bias ? weight.bias + first : nullptr,
                                     out + row * out_stride + first,
                                     out_stride,
                                     weight.num_outputs - first};
    for_row_tiles<TILE_ROWS>(std::min(rows_per_item, num_rows - row), piece);
  });
}

// out = inputs times the weight, plus the bias, rounded once to T; written as Out, which is T or float.
template <typename T, typename Out>
void multiply(const T* inputs, int64_t input_stride, const Linear& weight, Out* out, int64_t out_stride,
              int64_t num_rows) {
  // As many pieces as keep all threads busy to the end: of fewer rows while there are many, else of fewer outputs.
  const int64_t wanted = num_threads() == 1 ? 1 : 8 * num_threads();
  const auto num_pieces = [&](int64_t vectors, int64_t rows) {
    return (weight.num_outputs / (vectors * LANES) + 1) * ((num_rows + rows - 1) / rows);
  };
  int64_t rows_per_item = ROWS_PER_ITEM;
  while (rows_per_item > 4 * TILE_ROWS && num_pieces(TILE_VECTORS, rows_per_item) < wanted) rows_per_item /= 2;
  if (num_rows > 2 * TILE_ROWS || num_pieces(TILE_VECTORS, rows_per_item) >= wanted) {
    multiply_pieces<T, Out, TILE_VECTORS>(inputs, input_stride, weight, out, out_stride, num_rows, rows_per_item);
  } else {
    multiply_pieces<T, Out, 1>(inputs, input_stride, weight, out, out_stride, num_rows, rows_per_item);
  }
}
