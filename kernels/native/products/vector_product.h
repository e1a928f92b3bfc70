// Products with a weight on vector registers.
#pragma once
#include <type_traits>

#include "products/results.h"
#include "weights/nibbles.h"

// Rows per read of a panel. As long as the panel stays in the cache, more rows gain little.
constexpr int64_t ROWS_PER_ITEM = 96;

// V vectors of outputs of a panel, in groups of In.
template <typename In, int V>
struct PlainColumns {
  const char* starts[V];
  int64_t num_groups;

  PlainColumns(const Linear& weight, int64_t panel, int64_t first) : num_groups(weight.num_inputs / GROUP<In>) {
    const char* start = static_cast<const char*>(weight.packed) + panel * num_groups * PANEL_ROW_BYTES;
    for (int v = 0; v < V; ++v) starts[v] = start + first * GROUP_BYTES + v * VECTOR_BYTES;
  }

  template <int M, typename Sum>
  inline __attribute__((always_inline)) void add_products(Sum (&sums)[M][V], const In* rows, int64_t row_stride) const {
    Ahead<V> ahead{{}, PANEL_ROW_BYTES};
    for (int v = 0; v < V; ++v) ahead.starts[v] = starts[v] + PREFETCHED_GROUPS * PANEL_ROW_BYTES;
    accumulate<M, V>(sums, rows, row_stride, starts, PANEL_ROW_BYTES, num_groups, ahead);
  }
};

// V vectors of outputs of a panel of four-bit weights.
template <int V>
struct NibbleColumns {
  const char* panel;
  int first;
  int64_t num_blocks;

  NibbleColumns(const Linear& weight, int64_t number, int64_t first_output)
      : panel(panel_nibbles(weight, number)),
        first(static_cast<int>(first_output / LANES)),
        num_blocks(padded_inputs(weight.num_inputs) / BLOCK_INPUTS) {}

  template <int M>
  inline __attribute__((always_inline)) void add_products(Ints (&sums)[M][V], const uint8_t* rows,
                                                          int64_t row_stride) const {
    PartialSums<Ints, M, V> partial(sums);
    const char* block = panel;
    for (int64_t b = 0; b < num_blocks; ++b, block += BLOCK_BYTES, rows += BLOCK_INPUTS) {
      for (int v = 0; v < V; ++v) {
        for (int p = 0; p < PARTS; ++p) add_block(partial, block, v, p, rows, row_stride);
      }
    }
    partial.store(sums);
  }

 private:
  template <int M>
  inline __attribute__((always_inline)) void add_block(PartialSums<Ints, M, V>& partial, const char* block, int v,
                                                       int p, const uint8_t* rows, int64_t row_stride) const {
    const NibbleSteps steps = NibbleSteps::load(block, first + v, p);
    const char* nibbles = block + PANEL + (first + v) * VECTOR_BYTES;
    for (int pair = 0; pair < BLOCK_PAIRS; ++pair, nibbles += PANEL_ROW_BYTES) {
      if (p == 0) __builtin_prefetch(nibbles + NIBBLE_PREFETCH_BYTES);
      WordPart two[2];
      steps.unpack(load_part(nibbles, p), two[0], two[1]);
      const uint8_t* at = rows + 2 * pair * GROUP<uint8_t>;
      for (int m = 0; m < M; ++m) {
        IntPart& sum = partial.parts[m][v][p];
        sum = ::add_products(sum, at + m * row_stride, two[0]);
        sum = ::add_products(sum, at + m * row_stride + GROUP<uint8_t>, two[1]);
      }
    }
  }
};

// Multiplies rows with V vectors of a panel.
template <typename T, typename In, typename Out, int V, typename Columns>
struct PanelRows {
  const In* inputs;
  int64_t input_stride;
  Columns columns;
  Results<T, In, Out> results;

  template <int M>
  void run(int64_t row) const {
    typename Results<T, In, Out>::Sum sums[M][V];
    for (int v = 0; v < V; ++v) {
      const auto start = results.initial_sum(v);
      for (int m = 0; m < M; ++m) sums[m][v] = start;
    }
    columns.add_products(sums, inputs + row * input_stride, input_stride);
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V && v * LANES < results.num_outputs; ++v) results.write(sums[m][v], row + m, v);
    }
  }
};

// Multiplies rows with V vectors of outputs, from output first on.
template <typename T, int V, typename In, typename Out>
void multiply_piece(const In* inputs, int64_t input_stride, const Linear& weight, const Results<T, In, Out>& results,
                    int64_t num_rows, int64_t first) {
  const auto run = [&](const auto& columns) {
    const PanelRows<T, In, Out, V, std::decay_t<decltype(columns)>> piece{inputs, input_stride, columns, results};
    for_row_tiles<TILE_ROWS>(num_rows, piece);
  };
  if constexpr (sizeof(In) == 1) {
    if (weight.is_in_nibbles) return run(NibbleColumns<V>(weight, first / PANEL, first % PANEL));
  }
  run(PlainColumns<In, V>(weight, first / PANEL, first % PANEL));
}

// Cuts the work into pieces that keep all threads busy until the end. With many rows, pieces have fewer rows. Otherwise
// each thread gets the same number of wide pieces, whose outputs are adjacent in memory, and the rest is cut into
// narrow pieces. The cut does not change the bits of a sum. Calls run(number of vectors, first output, first row, end of
// rows), where the number is a constant.
template <int64_t MAX_ROWS = ROWS_PER_ITEM, int64_t MIN_ROWS = 4 * TILE_ROWS, typename Run>
void for_pieces(int64_t num_outputs, int64_t num_rows, const Run& run) {
  constexpr int64_t WIDTH = TILE_VECTORS * LANES;
  const int64_t min_items = num_threads() == 1 ? 1 : 8 * num_threads();
  const int64_t num_pieces = (num_outputs + WIDTH - 1) / WIDTH;
  int64_t rows = MAX_ROWS;
  const auto num_blocks = [&] { return (num_rows + rows - 1) / rows; };
  while (rows > MIN_ROWS && num_pieces * num_blocks() < min_items) rows /= 2;
  const int64_t num_wide = num_blocks() == 1 ? num_pieces / num_threads() * num_threads() : num_pieces;
  const int64_t num_narrow = std::max<int64_t>(0, (num_outputs - num_wide * WIDTH + LANES - 1) / LANES);
  const int64_t num_wide_items = num_wide * num_blocks();
  for_each(num_wide_items + num_narrow, [&](int64_t item) {
    if (item < num_wide_items) {
      const int64_t first = item / num_blocks() * WIDTH, row = item % num_blocks() * rows;
      run(std::integral_constant<int, TILE_VECTORS>{}, first, row, std::min(row + rows, num_rows));
    } else {
      const int64_t first = num_wide * WIDTH + (item - num_wide_items) * LANES;
      run(std::integral_constant<int, 1>{}, first, int64_t{0}, num_rows);
    }
  });
}

template <typename T, typename In, typename Out>
void multiply_by_vectors(const In* inputs, int64_t input_stride, const Linear& weight,
                         const Results<T, In, Out>& results, int64_t num_rows) {
  for_pieces(weight.num_outputs, num_rows, [&](auto vectors, int64_t first, int64_t start, int64_t end) {
    multiply_piece<T, vectors>(inputs + start * input_stride, input_stride, weight, results.at(start, first),
                               end - start, first);
  });
}
