// Products with a weight on tile registers, if tiles::EXIST.
#pragma once
#include "products/results.h"

// In is bfloat16 or uint8_t; a row of inputs is a multiple of 64 bytes.
template <typename T, typename In, typename Out>
void multiply_by_tiles(const In* inputs, int64_t input_stride, const Linear& weight,
                       const Results<T, In, Out>& results, int64_t num_rows);
