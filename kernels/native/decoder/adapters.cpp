// Low-rank adapters. See adapters.h.
#include "decoder/adapters.h"

#include "products/vector_product.h"

namespace {

// Outputs per piece of work in the second product, which has few inputs.
constexpr int64_t OUTPUTS_PER_PIECE = 4 * PANEL;

// Consecutive rows with the same adapter.
struct AdaptedRows {
  int64_t first, num;
  const AdaptedProduct* product;
};

// A piece of work: rows and a range of outputs. part is the part of the second product, null for the first product.
struct Piece {
  const AdaptedRows* rows;
  const AdaptedPart* part;
  int64_t first_output, num_outputs;
};

// The sum of a row with a strip is split into this many chains, since a single chain of a thousand products would wait
// for each of them. The number does not depend on the number of rows, so a row's bits do not either.
constexpr int CHAINS = PART_BYTES == VECTOR_BYTES ? 4 : 2;

// Multiplies rows with one strip of a.
template <typename T>
struct StripRows {
  const T* inputs;
  int64_t input_stride;
  const char* strip;
  int64_t num_groups;
  T* out;
  int64_t out_stride, num_outputs;

  template <int M>
  void run(int64_t row) const {
    const T* rows = inputs + row * input_stride;
    FloatPart sums[M][CHAINS][PARTS] = {};
    int64_t group = 0;
    for (; group + CHAINS <= num_groups; group += CHAINS) {
      for (int c = 0; c < CHAINS; ++c) {
        __builtin_prefetch(strip + (group + c + CHAINS * PREFETCHED_GROUPS) * VECTOR_BYTES);
        add_group(sums, rows, group + c, c);
      }
    }
    for (int c = 0; group < num_groups; ++group, ++c) add_group(sums, rows, group, c);
    for (int m = 0; m < M; ++m) {
      Floats whole;
      for (int p = 0; p < PARTS; ++p) {
        FloatPart sum = sums[m][0][p] + sums[m][1][p];
        if constexpr (CHAINS == 4) sum += sums[m][2][p] + sums[m][3][p];
        std::memcpy(reinterpret_cast<char*>(&whole) + p * PART_BYTES, &sum, PART_BYTES);
      }
      store(out + (row + m) * out_stride, whole, num_outputs);
    }
  }

 private:
  template <int M>
  inline __attribute__((always_inline)) void add_group(FloatPart (&sums)[M][CHAINS][PARTS], const T* rows,
                                                       int64_t group, int chain) const {
    for (int p = 0; p < PARTS; ++p) {
      const WordPart words = load_part(strip + group * VECTOR_BYTES, p);
      for (int m = 0; m < M; ++m) {
        sums[m][chain][p] = add_products(sums[m][chain][p], rows + m * input_stride + group * GROUP<T>, words);
      }
    }
  }
};

// Adds the products of rows with V vectors of b's outputs to out, and rounds once.
template <typename T, int V>
struct AddingRows {
  const T* inputs;
  int64_t input_stride;
  PlainColumns<T, V> columns;
  T* out;
  int64_t out_stride, num_outputs;

  template <int M>
  void run(int64_t row) const {
    Sums<Floats, M, V> sums;
    for_constants<M * V>([&](auto i) __attribute__((always_inline)) {
      constexpr int m = i / V, v = i % V;
      sums.set(m, v, load(out + (row + m) * out_stride + v * LANES, num_outputs - v * LANES));
    });
    columns.add_products(sums, inputs + row * input_stride, input_stride);
    for_constants<M * V>([&](auto i) __attribute__((always_inline)) {
      constexpr int m = i / V, v = i % V;
      if (v * LANES < num_outputs) {
        store(out + (row + m) * out_stride + v * LANES, sums.get(m, v), num_outputs - v * LANES);
      }
    });
  }

 private:
  static Floats load(const T* from, int64_t num) {
    Floats values = {};
    if (num >= LANES) {
      for (int i = 0; i < LANES; ++i) values[i] = to_float(from[i]);
    } else {
      for (int i = 0; i < num; ++i) values[i] = to_float(from[i]);
    }
    return values;
  }
};

// Cuts rows into runs with the same adapter, each at most one piece of work.
void cut_rows(const AdaptedProduct* products, const int64_t* slots, int64_t num_rows, std::vector<AdaptedRows>& runs) {
  runs.clear();
  for (int64_t row = 0, end; row < num_rows; row = end) {
    for (end = row + 1; end < num_rows && slots[end] == slots[row] && end - row < ROWS_PER_ITEM;) ++end;
    if (slots[row] >= 0 && products[slots[row]].num_parts) runs.push_back({row, end - row, products + slots[row]});
  }
}

}  // namespace

template <typename T>
void add_adapters(const T* inputs, int64_t input_stride, const AdaptedProduct* products, const int64_t* slots, T* out,
                  int64_t out_stride, int64_t num_rows) {
  static thread_local std::vector<AdaptedRows> runs;
  static thread_local std::vector<Piece> first, second;
  static thread_local std::vector<T> shrunk;
  cut_rows(products, slots, num_rows, runs);
  if (runs.empty()) return;
  int64_t width = 0;
  first.clear(), second.clear();
  for (const AdaptedRows& rows : runs) {
    width = std::max(width, rows.product->a.num_outputs);
    for (int64_t output = 0; output < rows.product->a.num_outputs; output += LANES) {
      first.push_back({&rows, nullptr, output, LANES});
    }
    for (int64_t p = 0; p < rows.product->num_parts; ++p) {
      const AdaptedPart& part = rows.product->parts[p];
      for (int64_t output = 0; output < part.b.num_outputs; output += OUTPUTS_PER_PIECE) {
        second.push_back({&rows, &part, output, std::min(OUTPUTS_PER_PIECE, part.b.num_outputs - output)});
      }
    }
  }
  if (static_cast<int64_t>(shrunk.size()) < num_rows * width) shrunk.resize(num_rows * width);
  T* const shrunk_rows = shrunk.data();  // captured by value, since the vector is thread-local
  const Piece *first_pieces = first.data(), *second_pieces = second.data();
  for_each(first.size(), [&](int64_t item) {
    const Piece& piece = first_pieces[item];
    const Linear& a = piece.rows->product->a;
    const int64_t num_groups = a.num_inputs / GROUP<T>;
    const StripRows<T> work{inputs + piece.rows->first * input_stride,
                            input_stride,
                            static_cast<const char*>(a.packed) + piece.first_output / LANES * num_groups * VECTOR_BYTES,
                            num_groups,
                            shrunk_rows + piece.rows->first * width + piece.first_output,
                            width,
                            a.num_outputs - piece.first_output};
    for_row_tiles<TILE_ROWS>(piece.rows->num, work);
  });
  for_each(second.size(), [&](int64_t item) {
    const Piece& piece = second_pieces[item];
    const AdaptedPart& part = *piece.part;
    const T* from = shrunk_rows + piece.rows->first * width + part.first_column;
    T* to = out + piece.rows->first * out_stride + part.first_output;
    for (int64_t output = piece.first_output; output < piece.first_output + piece.num_outputs;
         output += TILE_VECTORS * LANES) {
      const AddingRows<T, TILE_VECTORS> work{from,
                                             width,
                                             PlainColumns<T, TILE_VECTORS>(part.b, output / PANEL, output % PANEL),
                                             to + output,
                                             out_stride,
                                             part.b.num_outputs - output};
      for_row_tiles<TILE_ROWS>(piece.rows->num, work);
    }
  });
}

template void add_adapters(const float*, int64_t, const AdaptedProduct*, const int64_t*, float*, int64_t, int64_t);
template void add_adapters(const bfloat16*, int64_t, const AdaptedProduct*, const int64_t*, bfloat16*, int64_t,
                           int64_t);

#define PENSTOCK_ADAPTERS(T, suffix)                                                                          \
  extern "C" void add_adapters_##suffix(const T* inputs, int64_t input_stride, const AdaptedProduct* products, \
                                        const int64_t* slots, T* out, int64_t out_stride, int64_t num_rows) {  \
    add_adapters<T>(inputs, input_stride, products, slots, out, out_stride, num_rows);                         \
  }

PENSTOCK_ADAPTERS(float, float32)
PENSTOCK_ADAPTERS(bfloat16, bfloat16)
