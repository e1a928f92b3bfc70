// Products with a weight in blocks. See blocks.h.
#pragma once
#include "blocks.h"
#include "vector_product.h"

// Rows of sums that fit into registers together with the sums of a block.
constexpr int BLOCK_TILE_ROWS = TILE_ROWS > 4 ? 4 : TILE_ROWS;
// Prefetch distance within a panel.
constexpr int BLOCK_PREFETCH_BYTES = 8 << 10;

// Rows of signed bytes. Each block of a row has a step, the start of its sums (the part of the zero), and the sum of its
// inputs.
struct BlockRows {
  const int8_t* values;
  const float *steps, *sums;
  const int32_t* starts;
  int64_t num_inputs, num_blocks;

  BlockRows from(int64_t row) const {
    const int64_t block = row * num_blocks;
    return {values + row * num_inputs, steps + block, sums + block, starts + block, num_inputs, num_blocks};
  }
};

inline void quantize_block(const float* inputs, int64_t size, int32_t zero, int8_t* out, float* step, float* sum,
                           int32_t* start) {
  const float factor = choose_step(inputs, size, step);
  int32_t total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < size; ++i) {
    const int32_t number = static_cast<int32_t>(std::nearbyint(inputs[i] * factor));
    out[i] = static_cast<int8_t>(number);
    total += number;
  }
  *sum = *step * static_cast<float>(total);
  *start = -zero * total;
}

template <typename T>
BlockRows quantize_in_blocks(const T* rows, int64_t stride, int64_t num_rows, const Linear& weight) {
  static thread_local std::vector<int8_t> values;
  static thread_local std::vector<float> floats;
  static thread_local std::vector<int32_t> starts;
  const int64_t size = weight.num_inputs, block = weight.block_inputs, num_blocks = size / block;
  if (static_cast<int64_t>(values.size()) < num_rows * size) values.resize(num_rows * size);
  if (static_cast<int64_t>(starts.size()) < num_rows * num_blocks) {
    starts.resize(num_rows * num_blocks);
    floats.resize(2 * num_rows * num_blocks);
  }
  int8_t* const to = values.data();
  float *const steps = floats.data(), *const sums = steps + num_rows * num_blocks;
  int32_t* const first_starts = starts.data();
  const int32_t zero = block_zero(weight);
  for_ranges(num_rows, 8, [&](int64_t start, int64_t end) {
    for (int64_t row = start; row < end; ++row) {
      for (int64_t b = 0, at = row * num_blocks; b < num_blocks; ++b, ++at) {
        float inputs[NIBBLE_BLOCK];
#pragma omp simd
        for (int64_t i = 0; i < block; ++i) inputs[i] = to_float(rows[row * stride + b * block + i]);
        quantize_block(inputs, block, zero, to + row * size + b * block, steps + at, sums + at, first_starts + at);
      }
    }
  });
  return {to, steps, sums, first_starts, size, num_blocks};
}

// Adds the products of M rows with V vectors of outputs of a panel, from vector `first` on.
template <bool IN_NIBBLES, bool HAS_MINIMUMS, int M, int V>
__attribute__((noinline)) void add_block_products(Floats (&sums)[M][V], const Linear& weight, const char* block,
                                                  int first, const BlockRows& rows) {
  constexpr int HEAD = PANEL_HALVES_BYTES * (HAS_MINIMUMS ? 2 : 1);
  const int64_t size = IN_NIBBLES ? NIBBLE_BLOCK : weight.block_inputs;
  const int64_t num_groups = IN_NIBBLES ? NIBBLE_BLOCK / 2 / GROUP_BYTES : size / GROUP_BYTES;
  const int64_t bytes = HEAD + num_groups * PANEL_ROW_BYTES;
  PartialSums<Floats, M, V> partial(sums);
  for (int64_t b = 0; b < rows.num_blocks; ++b, block += bytes) {
    const int8_t* const inputs = rows.values + b * size;
    for (int at = 0; at < HEAD; at += VECTOR_BYTES) __builtin_prefetch(block + BLOCK_PREFETCH_BYTES + at);
    for (int v = 0; v < V; ++v) {
      for (int p = 0; p < PARTS; ++p) {
        const char* numbers = block + HEAD + (first + v) * VECTOR_BYTES;
        const char* halves = block + ((first + v) * LANES + p * PART_LANES) * sizeof(uint16_t);
        IntPart products[M];
        for (int m = 0; m < M; ++m) {
          products[m] = HAS_MINIMUMS ? IntPart{} : rows.starts[m * rows.num_blocks + b] - IntPart{};
        }
        for (int64_t group = 0; group < num_groups; ++group, numbers += PANEL_ROW_BYTES) {
          if (p == 0) __builtin_prefetch(numbers + BLOCK_PREFETCH_BYTES);
          const WordPart words = load_part(numbers, p);
          const int8_t* at = inputs + group * GROUP_BYTES;
          for (int m = 0; m < M; ++m, at += rows.num_inputs) {
            if constexpr (IN_NIBBLES) {
              products[m] = add_products(products[m], at, words & 0x0f0f0f0fu);
              products[m] = add_products(products[m], at + NIBBLE_BLOCK / 2, words >> 4 & 0x0f0f0f0fu);
            } else {
              products[m] = add_products(products[m], at, words);
            }
          }
        }
        const FloatPart scales = load_halves(halves);
        for (int m = 0; m < M; ++m) {
          const FloatPart factors = scales * rows.steps[m * rows.num_blocks + b];
          partial.parts[m][v][p] += __builtin_convertvector(products[m], FloatPart) * factors;
        }
        if constexpr (HAS_MINIMUMS) {
          const FloatPart minimums = load_halves(halves + PANEL_HALVES_BYTES);
          for (int m = 0; m < M; ++m) partial.parts[m][v][p] += minimums * rows.sums[m * rows.num_blocks + b];
        }
      }
    }
  }
  partial.store(sums);
}

// Multiplies rows with V vectors of outputs, from output `first` on.
template <typename T, typename Out, int V>
struct BlockPiece {
  const Linear& weight;
  const BlockRows& rows;
  Results<T, T, Out> results;
  int64_t first;

  template <int M>
  void run(int64_t row) const {
    Floats sums[M][V];
    for (int v = 0; v < V; ++v) {
      for (int m = 0; m < M; ++m) sums[m][v] = results.initial_sum(v);
    }
    const auto add = weight.is_in_nibbles ? (weight.has_minimums ? add_block_products<true, true, M, V>
                                                                 : add_block_products<true, false, M, V>)
                                          : (weight.has_minimums ? add_block_products<false, true, M, V>
                                                                 : add_block_products<false, false, M, V>);
    add(sums, weight, panel_blocks(weight, first / PANEL), static_cast<int>(first % PANEL / LANES), rows.from(row));
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V && v * LANES < results.num_outputs; ++v) results.write(sums[m][v], row + m, v);
    }
  }
};

template <typename T, typename Out>
void multiply_by_blocks(const T* inputs, int64_t input_stride, const Linear& weight, const Results<T, T, Out>& results,
                        int64_t num_rows) {
  const BlockRows rows = quantize_in_blocks(inputs, input_stride, num_rows, weight);
  for_pieces(weight.num_outputs, num_rows, [&](auto vectors, int64_t first, int64_t start, int64_t end) {
    const BlockPiece<T, Out, vectors> piece{weight, rows, results.at(0, first), first};
    for_row_tiles<BLOCK_TILE_ROWS>(end, piece, start);
  });
}
