// Products with a weight in blocks. See blocks.h.
#pragma once
#include "products/vector_product.h"
#include "weights/blocks.h"

// Rows of signed bytes, in groups of BLOCK_ROWS rows: [group][block][row][input of the block]. Each block of a row has
// a step, the start of its sums (the part of the zero), and the sum of its inputs: [group][block][row].
constexpr int BLOCK_ROWS = 16;

struct BlockRows {
  const int8_t* values;
  const float *steps, *sums;
  const int32_t* starts;
  int64_t num_blocks, block_inputs;

  // Returns the rows of a group.
  BlockRows group(int64_t number) const {
    const int64_t first = number * num_blocks * BLOCK_ROWS;
    return {values + first * block_inputs, steps + first, sums + first, starts + first, num_blocks, block_inputs};
  }

  // Returns the rows from a row of the group on.
  BlockRows from(int64_t row) const {
    return {values + row * block_inputs, steps + row, sums + row, starts + row, num_blocks, block_inputs};
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
  const int64_t block = weight.block_inputs, num_blocks = weight.num_inputs / block;
  const int64_t size = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS * num_blocks;
  if (static_cast<int64_t>(starts.size()) < size) starts.resize(size), floats.resize(2 * size);
  if (static_cast<int64_t>(values.size()) < size * block) values.resize(size * block);
  int8_t* const to = values.data();
  float *const steps = floats.data(), *const sums = steps + size;
  int32_t* const first_starts = starts.data();
  const int32_t zero = block_zero(weight);
  for_ranges(num_rows, 8, [&](int64_t start, int64_t end) {
    for (int64_t row = start; row < end; ++row) {
      int64_t at = row / BLOCK_ROWS * num_blocks * BLOCK_ROWS + row % BLOCK_ROWS;
      for (int64_t b = 0; b < num_blocks; ++b, at += BLOCK_ROWS) {
        float inputs[MAX_BLOCK_INPUTS];
#pragma omp simd
        for (int64_t i = 0; i < block; ++i) inputs[i] = to_float(rows[row * stride + b * block + i]);
        quantize_block(inputs, block, zero, to + at * block, steps + at, sums + at, first_starts + at);
      }
    }
  });
  return {to, steps, sums, first_starts, num_blocks, block};
}

// Adds products of the first rows of a group with vectors of outputs of a panel to sums, [num_rows][PANEL_VECTORS].
void add_block_products(Floats* sums, const Linear& weight, int64_t first_output, int num_vectors,
                        const BlockRows& rows, int num_rows);

template <typename T, typename Out>
void multiply_by_blocks(const T* inputs, int64_t input_stride, const Linear& weight, const Results<T, T, Out>& results,
                        int64_t num_rows) {
  constexpr int64_t ROWS_EACH = 8 * BLOCK_ROWS;
  const BlockRows rows = quantize_in_blocks(inputs, input_stride, num_rows, weight);
  for_pieces<ROWS_EACH, BLOCK_ROWS>(
      weight.num_outputs, num_rows, [&](auto vectors, int64_t first, int64_t start, int64_t end, int64_t) {
        const Results<T, T, Out> outputs = results.at(0, first);
        for (int64_t row = start; row < end; row += BLOCK_ROWS) {
          const int num = static_cast<int>(std::min<int64_t>(BLOCK_ROWS, end - row));
          Floats sums[BLOCK_ROWS][PANEL_VECTORS];
          for (int v = 0; v < vectors; ++v) {
            const Floats start_of_sums = outputs.initial_sum(v);
            for (int m = 0; m < num; ++m) sums[m][v] = start_of_sums;
          }
          add_block_products(sums[0], weight, first, vectors, rows.group(row / BLOCK_ROWS), num);
          for (int m = 0; m < num; ++m) {
            for (int v = 0; v < vectors && v * LANES < outputs.num_outputs; ++v) outputs.write(sums[m][v], row + m, v);
          }
        }
      });
}
