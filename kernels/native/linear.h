// Products with a weight that was laid out for it.
#pragma once
#include "panels.h"

// out = inputs times the weight, plus the bias, rounded once to T; written as Out, which is T or float. In linear.cpp
// for <float, float>, <bfloat16, bfloat16> and <bfloat16, float>.
template <typename T, typename Out>
void multiply(const T* inputs, int64_t input_stride, const Linear& weight, Out* out, int64_t out_stride,
              int64_t num_rows);

// Whether products of bfloat16 on vectors are made of products of floats here.
bool widens_pairs();
