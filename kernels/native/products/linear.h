// Products with a packed weight.
#pragma once
#include "weights/panels.h"

// out = inputs times weight, plus bias, rounded once to T and written as Out, which is T or float. Instantiated in
// linear.cpp for <float, float>, <bfloat16, bfloat16> and <bfloat16, float>.
template <typename T, typename Out>
void multiply(const T* inputs, int64_t input_stride, const Linear& weight, Out* out, int64_t out_stride,
              int64_t num_rows);

// Whether this processor computes products of bfloat16 on vectors as products of floats.
bool uses_wide_products();
