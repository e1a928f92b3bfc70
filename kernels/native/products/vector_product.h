// Products with a weight on vector registers.
#pragma once
#include <type_traits>

#include "products/results.h"
#include "weights/nibbles.h"

// Rows per read of a panel. As long as the panel stays in the cache, more rows gain little.
constexpr int64_t ROWS_PER_ITEM = 96;

// A pass over a panel. Passes 0 to num - 1 prefetch a part each of the panel that the thread probably multiplies next,
// which is read faster than the first pass alone could. Others prefetch within their panel.
struct PanelPass {
  int64_t index = 0, num = 0;
  const char* next = nullptr;
};

constexpr int64_t PREFETCHING_PASSES = 4;
// Prefetch distance within a panel.
constexpr int64_t GROUPS_AHEAD = 32;

// V vectors of outputs of a panel, in groups of In.
template <typename In, int V>
struct PlainColumns {
  const char* start;
  int64_t num_groups;

  PlainColumns(const Linear& weight, int64_t panel, int64_t first) : num_groups(weight.num_inputs / GROUP<In>) {
    start = static_cast<const char*>(weight.packed) + panel * num_groups * PANEL_ROW_BYTES + first * GROUP_BYTES;
  }

  template <int M, typename Sum>
  inline __attribute__((always_inline)) void add_products(Sums<Sum, M, V>& sums, const In* rows, int64_t row_stride,
                                                          const PanelPass& pass = {}) const {
    if (pass.index < 0 || pass.index >= pass.num) {
      const char* const ahead = start + GROUPS_AHEAD * PANEL_ROW_BYTES;
      return add_groups<M, INTO_L1>(sums, rows, row_stride, ahead, PANEL_ROW_BYTES);
    }
    const char* const ahead = pass.next + pass.index * num_groups * PANEL_ROW_BYTES / pass.num;
    add_groups<M, INTO_L2>(sums, rows, row_stride, ahead, PANEL_ROW_BYTES / pass.num);
  }

 private:
  // Each group prefetches V lines at `ahead`, which moves by ahead_stride bytes.
  template <int M, int LOCALITY, typename Sum>
  inline __attribute__((always_inline)) void add_groups(Sums<Sum, M, V>& sums, const In* rows, int64_t row_stride,
                                                        const char* ahead, int64_t ahead_stride) const {
    const char* columns = start;
    for (int64_t group = 0; group < num_groups; ++group) {
      WordPart words[V * PARTS];
      for_constants<V * PARTS>([&](auto p) __attribute__((always_inline)) { words[p] = load_part(columns, p); });
      for_constants<V>([&](auto v) __attribute__((always_inline)) {
        __builtin_prefetch(ahead + v * VECTOR_BYTES, 0, LOCALITY);
      });
      add_group<M, V>(sums, rows + group * GROUP<In>, row_stride, words);
      columns += PANEL_ROW_BYTES;
      ahead += ahead_stride;
    }
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
  inline __attribute__((always_inline)) void add_products(Sums<Ints, M, V>& sums, const uint8_t* rows,
                                                          int64_t row_stride, const PanelPass&) const {
    const char* block = panel;
    for (int64_t b = 0; b < num_blocks; ++b, block += BLOCK_BYTES, rows += BLOCK_INPUTS) {
      for_constants<V * PARTS>([&](auto part) __attribute__((always_inline)) {
        add_block<part>(sums, block, rows, row_stride);
      });
    }
  }

 private:
  template <int PART, int M>
  inline __attribute__((always_inline)) void add_block(Sums<Ints, M, V>& sums, const char* block, const uint8_t* rows,
                                                       int64_t row_stride) const {
    constexpr int v = PART / PARTS, p = PART % PARTS;
    const NibbleSteps steps = NibbleSteps::load(block, first + v, p);
    const char* nibbles = block + PANEL + (first + v) * VECTOR_BYTES;
    for (int pair = 0; pair < BLOCK_PAIRS; ++pair, nibbles += PANEL_ROW_BYTES) {
      if (p == 0) __builtin_prefetch(nibbles + NIBBLE_PREFETCH_BYTES);
      WordPart two[2];
      steps.unpack(load_part(nibbles, p), two[0], two[1]);
      const uint8_t* at = rows + 2 * pair * GROUP<uint8_t>;
      for_constants<M>([&](auto m) __attribute__((always_inline)) {
        IntPart& sum = sums.parts[m * V * PARTS + PART];
        sum = ::add_products(sum, at + m * row_stride, two[0]);
        sum = ::add_products(sum, at + m * row_stride + GROUP<uint8_t>, two[1]);
      });
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
  PanelPass first_pass;

  template <int M>
  void run(int64_t row) const {
    Sums<typename Results<T, In, Out>::Sum, M, V> sums;
    sums.set_rows([&](int v) __attribute__((always_inline)) { return results.initial_sum(v); });
    columns.add_products(sums, inputs + row * input_stride, input_stride,
                         {first_pass.index + row / TILE_ROWS, first_pass.num, first_pass.next});
    results.write_rows(sums, row);
  }
};

// Multiplies rows with V vectors of outputs, from output first on.
template <typename T, int V, typename In, typename Out>
void multiply_piece(const In* inputs, int64_t input_stride, const Linear& weight, const Results<T, In, Out>& results,
                    int64_t num_rows, int64_t first, int64_t next) {
  const int64_t num_passes = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
  PanelPass first_pass;
  if (V == PANEL_VECTORS && num_passes > 1 && next < weight.num_outputs && !weight.is_in_nibbles) {
    // Nothing has prefetched the thread's first panel.
    const bool waits = first < next - first;
    first_pass = {-waits, std::min(num_passes - waits, PREFETCHING_PASSES),
                  PlainColumns<In, V>(weight, next / PANEL, 0).start};
  }
  const auto run = [&](const auto& columns) {
    const PanelRows<T, In, Out, V, std::decay_t<decltype(columns)>> piece{inputs, input_stride, columns, results,
                                                                          first_pass};
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
// rows, first output of the thread's next piece), where the number is a constant.
template <int64_t MAX_ROWS = ROWS_PER_ITEM, int64_t MIN_ROWS = 4 * TILE_ROWS, typename Run>
void for_pieces(int64_t num_outputs, int64_t num_rows, const Run& run) {
  if (num_rows == 0) return;
  constexpr int64_t WIDTH = TILE_VECTORS * LANES;
  const int64_t min_items = num_threads() == 1 ? 1 : 8 * num_threads();
  const int64_t num_pieces = (num_outputs + WIDTH - 1) / WIDTH;
  int64_t rows = MAX_ROWS;
  const auto num_blocks = [&] { return (num_rows + rows - 1) / rows; };
  while (rows > MIN_ROWS && num_pieces * num_blocks() < min_items) rows /= 2;
  rows = std::min(rows, (num_rows / num_blocks() + MIN_ROWS) / MIN_ROWS * MIN_ROWS);
  // Of the pieces that a thread takes in turn. Within an item, num_threads() is 1.
  const int64_t distance = (num_threads() + num_blocks() - 1) / num_blocks() * WIDTH;
  const int64_t num_wide = num_blocks() == 1 ? num_pieces / num_threads() * num_threads() : num_pieces;
  const int64_t num_narrow = std::max<int64_t>(0, (num_outputs - num_wide * WIDTH + LANES - 1) / LANES);
  const int64_t num_wide_items = num_wide * num_blocks();
  for_each(num_wide_items + num_narrow, [&](int64_t item) {
    if (item < num_wide_items) {
      const int64_t first = item / num_blocks() * WIDTH, row = item % num_blocks() * rows;
      run(std::integral_constant<int, TILE_VECTORS>{}, first, row, std::min(row + rows, num_rows), first + distance);
    } else {
      const int64_t first = num_wide * WIDTH + (item - num_wide_items) * LANES;
      run(std::integral_constant<int, 1>{}, first, int64_t{0}, num_rows, num_outputs);
    }
  });
}

template <typename T, typename In, typename Out>
void multiply_by_vectors(const In* inputs, int64_t input_stride, const Linear& weight,
                         const Results<T, In, Out>& results, int64_t num_rows) {
  for_pieces(weight.num_outputs, num_rows, [&](auto vectors, int64_t first, int64_t start, int64_t end,
                                                int64_t next) {
    multiply_piece<T, vectors>(inputs + start * input_stride, input_stride, weight, results.at(start, first),
                               end - start, first, next);
  });
}
