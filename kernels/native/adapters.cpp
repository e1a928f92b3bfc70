// Low-rank adapters. See adapters.h.
#include "adapters.h"

#include "vector_product.h"

namespace {

// Outputs of one piece of work in the second product, whose inputs are few: some panels.
constexpr int64_t OUTPUTS_PER_PIECE = 4 * PANEL;

// Rows that follow each other and have one adapter.
struct AdaptedRows {
  int64_t first, num;
  const AdaptedProduct* product;
};

// A piece of a product: some rows, and outputs from one on. The second product's is a part's.
struct Piece {
  const AdaptedRows* rows;
  const AdaptedPart* part;
  int64_t first_output, num_outputs;
};

// Sums of some rows with V vectors of b's outputs, on top of what is there, rounded once.
template <typename T, int V>
struct AddingRows {
  const T* inputs;
  int64_t input_stride;
  PlainColumns<T, V> columns;
  T* out;
  int64_t out_stride, num_outputs;

  template <int M>
  void run(int64_t row) const {
    Floats sums[M][V];
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V; ++v) sums[m][v] = load(out + (row + m) * out_stride + v * LANES, num_outputs - v * LANES);
    }
    columns.add_products(sums, inputs + row * input_stride, input_stride);
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < V && v * LANES < num_outputs; ++v) {
        store(out + (row + m) * out_stride + v * LANES, sums[m][v], num_outputs - v * LANES);
      }
    }
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

// Rows in runs of one adapter, cut so that each is a piece of work.
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
  static thread_local std::vector<T> between;
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
  if (static_cast<int64_t>(between.size()) < num_rows * width) between.resize(num_rows * width);
  T* const made = between.data();  // the threads have vectors of their own
  const Piece *ones = first.data(), *twos = second.data();
  for_each(first.size(), [&](int64_t item) {
    const Piece& piece = ones[item];
    const Linear& a = piece.rows->product->a;
    const auto results = Results<T, T, T>::of(nullptr, a, made + piece.rows->first * width, width);
    multiply_piece<T, 1>(inputs + piece.rows->first * input_stride, input_stride, a,
                         results.from(0, piece.first_output), piece.rows->num, piece.first_output);
  });
  for_each(second.size(), [&](int64_t item) {
    const Piece& piece = twos[item];
    const AdaptedPart& part = *piece.part;
    const T* from = made + piece.rows->first * width + part.first_column;
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
