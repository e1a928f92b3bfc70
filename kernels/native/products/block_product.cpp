// Products with a weight in blocks, for all forms of blocks. Tile registers are not used: the sums of each block
// must leave them to be scaled, which costs what they save. See block_product.h.
#include "products/block_product.h"

namespace {

// Prefetch distance within a panel.
constexpr int PREFETCH_BYTES = 8 << 10;

// Calls use(form) with the BlockForm of weight.
template <typename Use>
void for_form(const Linear& weight, const Use& use) {
  const auto choose = [&](auto bits, auto inputs) {
    if (weight.has_minimums) return use(BlockForm<bits, inputs, true>{});
    use(BlockForm<bits, inputs, false>{});
  };
  const std::integral_constant<int, 16> small;
  const std::integral_constant<int, 32> large;
  if (weight.block_inputs == large) {
    if (weight.block_bits == 4) return choose(std::integral_constant<int, 4>{}, large);
    if (weight.block_bits == 5) return choose(std::integral_constant<int, 5>{}, large);
    return choose(std::integral_constant<int, 8>{}, large);
  }
  if (weight.block_bits == 4) return choose(std::integral_constant<int, 4>{}, small);
  if (weight.block_bits == 6) return choose(std::integral_constant<int, 6>{}, small);
  choose(std::integral_constant<int, 8>{}, small);
}

inline FloatPart load_floats(const char* from) {
  FloatPart floats;
  std::memcpy(&floats, from, sizeof(floats));
  return floats;
}

// Scales and minimums of a part of a vector of outputs.
template <typename Form>
struct BlockScales {
  FloatPart scales, minimums;

  BlockScales(const char* block, int vector, int part)
      : scales(load_halves(block + (vector * LANES + part * PART_LANES) * sizeof(uint16_t))), minimums{} {
    if constexpr (Form::HAS_MINIMUMS) {
      minimums = load_halves(block + PANEL_HALVES_BYTES + (vector * LANES + part * PART_LANES) * sizeof(uint16_t));
    }
  }

  // Adds the products of a block of a row to the sums at `sums`.
  inline __attribute__((always_inline)) void add(IntPart products, float step, float sum, char* sums) const {
    FloatPart total = load_floats(sums) + __builtin_convertvector(products, FloatPart) * (scales * step);
    if constexpr (Form::HAS_MINIMUMS) total += minimums * sum;
    std::memcpy(sums, &total, sizeof(total));
  }
};

// Adds the products of M rows with vectors of outputs.
template <typename Form, int M>
__attribute__((noinline)) void add_rows(Floats* sums, const char* block, int first, int num_vectors,
                                        const BlockRows& rows) {
  const int8_t* inputs = rows.values;
  const float *steps = rows.steps, *input_sums = rows.sums;
  const int32_t* starts = rows.starts;
  for (int64_t b = 0; b < rows.num_blocks; ++b, block += Form::BYTES) {
    for (int v = 0; v < num_vectors; ++v) {
      const char* numbers = block + Form::HEAD + (first + v) * VECTOR_BYTES;
      for (int at = 0; at < Form::BYTES / num_vectors; at += VECTOR_BYTES) {
        __builtin_prefetch(block + PREFETCH_BYTES + v * (Form::BYTES / num_vectors) + at);
      }
      for (int p = 0; p < PARTS; ++p) {
        IntPart products[M];
        for_constants<M>([&](auto m) __attribute__((always_inline)) {
          products[m] = Form::HAS_MINIMUMS ? IntPart{} : starts[m] - IntPart{};
        });
        Form::for_groups(numbers, p, [&](auto group, WordPart words) __attribute__((always_inline)) {
          for_constants<M>([&](auto m) __attribute__((always_inline)) {
            products[m] = add_products(products[m], inputs + m * Form::INPUTS + group * GROUP_BYTES, words);
          });
        });
        const BlockScales<Form> scales(block, first + v, p);
        char* const to = reinterpret_cast<char*>(sums + v) + p * PART_BYTES;
        for_constants<M>([&](auto m) __attribute__((always_inline)) {
          scales.add(products[m], steps[m], input_sums[m], to + m * PANEL_VECTORS * VECTOR_BYTES);
        });
      }
    }
    inputs += BLOCK_ROWS * Form::INPUTS, steps += BLOCK_ROWS, input_sums += BLOCK_ROWS, starts += BLOCK_ROWS;
  }
}

// Adds the products of num_rows rows, as many at a time as possible.
template <typename Form, int M = BLOCK_ROWS / 2>
void add_all_rows(Floats* sums, const char* block, int first, int num_vectors, const BlockRows& rows, int num_rows) {
  int row = 0;
  for (; row + M <= num_rows; row += M) {
    add_rows<Form, M>(sums + row * PANEL_VECTORS, block, first, num_vectors, rows.from(row));
  }
  if constexpr (M > 1) {
    if (row == num_rows) return;
    add_all_rows<Form, M / 2>(sums + row * PANEL_VECTORS, block, first, num_vectors, rows.from(row), num_rows - row);
  }
}

}  // namespace

void add_block_products(Floats* sums, const Linear& weight, int64_t first_output, int num_vectors,
                        const BlockRows& rows, int num_rows) {
  const char* blocks = panel_blocks(weight, first_output / PANEL);
  const int first = static_cast<int>(first_output % PANEL / LANES);
  for_form(weight, [&](auto form) { add_all_rows<decltype(form)>(sums, blocks, first, num_vectors, rows, num_rows); });
}
