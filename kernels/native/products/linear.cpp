// Products with a weight. See linear.h.
#include "products/linear.h"

#include "products/block_product.h"
#include "products/tile_product.h"
#include "products/tiles.h"
#include "products/vector_product.h"
#include "products/wide_product.h"
#include "weights/nibbles.h"

namespace {

// With more rows, unpacking the bytes for tiles pays off.
constexpr int64_t MAX_ROWS_OF_NIBBLES_ON_VECTORS = 6;

// Multiplies on tile registers if they exist and the inputs fill them, else on vectors. The choice depends on the
// processor and the weight's shape only, because the methods round differently and a row's bits must not depend on
// other rows.
template <typename T, typename In, typename Out>
void multiply_rows(const In* inputs, int64_t input_stride, const Linear& weight, const Results<T, In, Out>& results,
                   int64_t num_rows) {
  if constexpr (tiles::EXIST && sizeof(In) < sizeof(float)) {
    if (tiles::are_enabled && weight.num_inputs * sizeof(In) % tiles::ROW_BYTES == 0) {
      return multiply_by_tiles(inputs, input_stride, weight, results, num_rows);
    }
  }
  if constexpr (sizeof(In) < sizeof(float)) {
    if (wide::Form<In>::is_better()) return wide::multiply(inputs, input_stride, weight, results, num_rows);
  }
  multiply_by_vectors(inputs, input_stride, weight, results, num_rows);
}

// Sums of bytes are integers with the same scaling, so both methods give the same bits and the number of rows can
// decide.
template <typename T, typename Out>
void multiply_by_nibbles(const uint8_t* inputs, int64_t input_stride, const Linear& weight,
                         const Results<T, uint8_t, Out>& results, int64_t num_rows) {
  if constexpr (tiles::EXIST) {
    if (tiles::are_enabled && num_rows > MAX_ROWS_OF_NIBBLES_ON_VECTORS) {
      return multiply_by_tiles(inputs, input_stride, weight, results, num_rows);
    }
  }
  if (wide::Form<uint8_t>::is_better() && num_rows > wide::Form<uint8_t>::FEW_ROWS) {
    return wide::multiply(inputs, input_stride, weight, results, num_rows);
  }
  multiply_by_vectors(inputs, input_stride, weight, results, num_rows);
}

}  // namespace

bool uses_wide_products() { return wide::is_better_for_pairs(); }

template <typename T, typename Out>
void multiply(const T* inputs, int64_t input_stride, const Linear& weight, Out* out, int64_t out_stride,
              int64_t num_rows) {
  if (weight.block_inputs) {
    const auto results = Results<T, T, Out>::for_product(nullptr, weight, out, out_stride);
    multiply_by_blocks(inputs, input_stride, weight, results, num_rows);
  } else if (weight.scales) {
    const int64_t row_bytes = weight.is_in_nibbles ? padded_inputs(weight.num_inputs) : weight.num_inputs;
    const QuantizedRows rows =
        quantize_rows(inputs, input_stride, num_rows, weight.num_inputs, row_bytes);
    const auto results = Results<T, uint8_t, Out>::for_product(rows.steps, weight, out, out_stride);
    if (weight.is_in_nibbles) {
      multiply_by_nibbles(rows.values, row_bytes, weight, results, num_rows);
    } else {
      multiply_rows(rows.values, row_bytes, weight, results, num_rows);
    }
  } else {
    const auto results = Results<T, T, Out>::for_product(nullptr, weight, out, out_stride);
    multiply_rows(inputs, input_stride, weight, results, num_rows);
  }
}

template void multiply(const float*, int64_t, const Linear&, float*, int64_t, int64_t);
template void multiply(const bfloat16*, int64_t, const Linear&, bfloat16*, int64_t, int64_t);
template void multiply(const bfloat16*, int64_t, const Linear&, float*, int64_t, int64_t);

#define PENSTOCK_LINEAR(T, suffix)                                                                                  \
  extern "C" void linear_##suffix(const T* inputs, int64_t stride, const Linear* weight, T* out, int64_t num_rows) { \
    multiply<T, T>(inputs, stride, *weight, out, weight->num_outputs, num_rows);                                    \
  }

PENSTOCK_LINEAR(float, float32)
PENSTOCK_LINEAR(bfloat16, bfloat16)
