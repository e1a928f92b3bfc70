// Operations on rows between the products of a layer. Rows are independent of each other.
#include "decoder/layer_ops.h"

#include <algorithm>

#include "base/parallel.h"

namespace {

// Smaller pieces finish before another thread could help.
constexpr int64_t ELEMENTS_PER_PIECE = 16384;

// Runs body(row) for every row, several per piece.
template <typename Body>
void for_rows(int64_t num_rows, int64_t size, const Body& body) {
  for_ranges(num_rows, std::max<int64_t>(1, ELEMENTS_PER_PIECE / size), [&](int64_t start, int64_t end) {
    for (int64_t row = start; row < end; ++row) body(row);
  });
}

// Normalises inputs + residual and stores the sum in residual; without residual (null) normalises inputs. weight has
// weight_rows rows, which repeat, of the dtype or of floats, see norm_row.
template <typename T, typename W>
void rms_norm(const T* inputs, int64_t stride, T* residual, const W* weight, int64_t weight_rows, T* out,
              int64_t num_rows, int64_t size, float eps) {
  for_rows(num_rows, size, [&](int64_t row) {
    const T* values = inputs + row * stride;
    if (residual) {
      add_row(values, residual + row * size, size);
      values = residual + row * size;
    }
    norm_row(values, weight + row % weight_rows * size, out + row * size, size, eps);
  });
}

template <typename T>
void rotary(const T* heads, int64_t token_stride, int64_t head_stride, const T* cos, const T* sin, T* out,
            int64_t num_tokens, int64_t num_heads, int64_t head_dim) {
  for_rows(num_tokens, num_heads * head_dim, [&](int64_t token) {
    for (int64_t head = 0; head < num_heads; ++head) {
      rotate_row(heads + token * token_stride + head * head_stride, cos + token * head_dim, sin + token * head_dim,
                 out + (token * num_heads + head) * head_dim, head_dim);
    }
  });
}

template <typename T>
void silu_and_mul(const T* gate_up, T* out, int64_t num_rows, int64_t size) {
  for_rows(num_rows, size, [&](int64_t row) { gate_row<Silu>(gate_up + row * 2 * size, out + row * size, size); });
}

}  // namespace

#define PENSTOCK_LAYER_OPS(T, suffix)                                                                               \
  extern "C" void rms_norm_##suffix(const T* inputs, int64_t stride, T* residual, const void* weight,               \
                                    int64_t is_wide, int64_t weight_rows, T* out, int64_t num_rows, int64_t size,  \
                                    float eps) {                                                                    \
    if (is_wide) {                                                                                                  \
      rms_norm(inputs, stride, residual, static_cast<const float*>(weight), weight_rows, out, num_rows, size, eps); \
    } else {                                                                                                        \
      rms_norm(inputs, stride, residual, static_cast<const T*>(weight), weight_rows, out, num_rows, size, eps);     \
    }                                                                                                               \
  }                                                                                                                 \
  extern "C" void rotary_##suffix(const T* heads, int64_t token_stride, int64_t head_stride, const T* cos,          \
                                  const T* sin, T* out, int64_t num_tokens, int64_t num_heads, int64_t head_dim) { \
    rotary<T>(heads, token_stride, head_stride, cos, sin, out, num_tokens, num_heads, head_dim);                   \
  }                                                                                                                 \
  extern "C" void silu_and_mul_##suffix(const T* gate_up, T* out, int64_t num_rows, int64_t size) {                \
    silu_and_mul<T>(gate_up, out, num_rows, size);                                                                  \
  }

PENSTOCK_LAYER_OPS(float, float32)
PENSTOCK_LAYER_OPS(bfloat16, bfloat16)
