// Low-rank adapters beside the products of a layer.
#pragma once
#include "panels.h"

constexpr int MAX_ADAPTED_PARTS = 4;

// As kernels/lora/packed.py has it, too. A part is some of a product's outputs, such as the keys of queries, keys and
// values; what an adapter adds there is b times its columns of what a makes of the inputs.
struct AdaptedPart {
  Linear b;
  int64_t first_column, first_output;
};

// One adapter at one product. Without parts it changes nothing there. Ranks are small, so a lies in strips of 16 outputs,
// [strips, groups of inputs, 16], where b, as every weight, lies in panels of 64.
struct AdaptedProduct {
  Linear a;
  AdaptedPart parts[MAX_ADAPTED_PARTS];
  int64_t num_parts;
};

// Adds to each row of out what the row's adapter makes of its inputs. products are one product's, a slot each; slots has
// the slot of each row, below 0 for none. A row's sums are its own: they do not show which others there are.
template <typename T>
void add_adapters(const T* inputs, int64_t input_stride, const AdaptedProduct* products, const int64_t* slots, T* out,
                  int64_t out_stride, int64_t num_rows);
