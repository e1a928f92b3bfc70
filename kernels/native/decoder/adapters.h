// Low-rank adapters of the products of a layer.
#pragma once
#include "weights/panels.h"

constexpr int MAX_ADAPTED_PARTS = 4;

// Matches kernels/lora/packed.py. A part is a range of a product's outputs, such as the keys of the QKV projection. The
// adapter's update of a part is b times the part's columns of the output of a.
struct AdaptedPart {
  Linear b;
  int64_t first_column, first_output;
};

// One adapter of one product; without parts it has no effect. Ranks are small, so a is packed in strips of 16 outputs,
// [strips, groups of inputs, 16], while b is packed in panels of 64 outputs like every weight.
struct AdaptedProduct {
  Linear a;
  AdaptedPart parts[MAX_ADAPTED_PARTS];
  int64_t num_parts;
};

// Adds the update of each row's adapter to out. products has the adapters of one product by slot; slots has the slot of
// each row, negative for none. A row's bits do not depend on the other rows.
template <typename T>
void add_adapters(const T* inputs, int64_t input_stride, const AdaptedProduct* products, const int64_t* slots, T* out,
                  int64_t out_stride, int64_t num_rows);
