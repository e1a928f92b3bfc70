// Products with a weight on vector registers.
#pragma once
#include "panels.h"
#include "results.h"

// Rows that share a reading of a panel: as long as the panel stays in the cache, more gain little.
constexpr int64_t ROWS_PER_ITEM = 96;

// The products of some rows with V vectors of a panel.
template <typename T, typename In, typename Out, int V>
struct PanelRows {
  const In* inputs;
  int64_t input_stride;
  const char* columns;
  int64_t num_groups;
  Results<T, In, Out> results;

  template <int M>
  void run(int64_t row) const {
    typename Results<T, In, Out>::Sum sums[M][V];
    const char* starts[V];
    for (int v = 0; v < V; ++v) {
      const auto start = results.start_of(v);
      for (int m = 0; m < M; ++m) sums[m][v] = start;
      starts[v] = columns + v * VECTOR_BYTES;
    }
    accumulate<M, V>(sums, inputs + row * input_stride, input_stride, starts, PANEL_ROW_BYTES, num_groups);
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V && v * LANES < results.num_outputs; ++v) results.put(sums[m][v], row + m, v);
    }
  }
};

// In pieces of V vectors of outputs by rows_per_item rows.
template <typename T, int V, typename In, typename Out>
void multiply_pieces(const In* inputs, int64_t input_stride, const Linear& weight, const Results<T, In, Out>& results,
                     int64_t num_rows, int64_t rows_per_item) {
  constexpr int64_t WIDTH = V * LANES;
  const int64_t num_groups = weight.num_inputs / GROUP<In>;
  const int64_t num_blocks = (num_rows + rows_per_item - 1) / rows_per_item;
  for_each((weight.num_outputs + WIDTH - 1) / WIDTH * num_blocks, [&](int64_t item) {
    const int64_t first = item / num_blocks * WIDTH, row = item % num_blocks * rows_per_item;
    const char* panel = static_cast<const char*>(weight.packed) + first / PANEL * num_groups * PANEL_ROW_BYTES;
    const PanelRows<T, In, Out, V> piece{inputs + row * input_stride, input_stride,
                                         panel + first % PANEL * GROUP_BYTES, num_groups, results.from(row, first)};
    for_row_tiles<TILE_ROWS>(std::min(rows_per_item, num_rows - row), piece);
  });
}

// Cuts the work into as many pieces as keep all threads busy to the end: of fewer rows while there are many, else of
// fewer outputs.
template <typename T, typename In, typename Out>
void multiply_by_vectors(const In* inputs, int64_t input_stride, const Linear& weight,
                         const Results<T, In, Out>& results, int64_t num_rows) {
  const int64_t wanted = num_threads() == 1 ? 1 : 8 * num_threads();
  const auto num_pieces = [&](int64_t vectors, int64_t rows) {
    return (weight.num_outputs / (vectors * LANES) + 1) * ((num_rows + rows - 1) / rows);
  };
  int64_t rows = ROWS_PER_ITEM;
  while (rows > 4 * TILE_ROWS && num_pieces(TILE_VECTORS, rows) < wanted) rows /= 2;
  if (num_rows > 2 * TILE_ROWS || num_pieces(TILE_VECTORS, rows) >= wanted) {
    multiply_pieces<T, TILE_VECTORS>(inputs, input_stride, weight, results, num_rows, rows);
  } else {
    multiply_pieces<T, 1>(inputs, input_stride, weight, results, num_rows, rows);
  }
}
