// What happens between the products of a layer. Rows are independent, so a row's result does not depend on the others.
#include "scalar.h"

namespace {

// out = (inputs + residual) scaled to a root mean square of one, times weight; residual becomes the sum.
// Without a residual out is that of inputs alone. weight repeats every weight_rows rows.
template <typename T>
void rms_norm(const T* inputs, int64_t stride, T* residual, const T* weight, int64_t weight_rows, T* out,
              int64_t num_rows, int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (num_rows * size > 32768)
  for (int64_t row = 0; row < num_rows; ++row) {
    const T* in = inputs + row * stride;
    T* to = out + row * size;
    const T* scale = weight + (row % weight_rows) * size;
    float sum = 0;
    if (residual) {
      T* stream = residual + row * size;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < size; ++i) {
        T added = from_float<T>(to_float(in[i]) + to_float(stream[i]));
        stream[i] = added;
        sum += to_float(added) * to_float(added);
      }
      in = stream;
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < size; ++i) sum += to_float(in[i]) * to_float(in[i]);
    }
    float factor = 1.0f / std::sqrt(sum / size + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      to[i] = from_float<T>(to_float(from_float<T>(to_float(in[i]) * factor)) * to_float(scale[i]));
    }
  }
}

template <typename T>
void rotary(const T* heads, int64_t token_stride, int64_t head_stride, const T* cos, const T* sin, T* out,
            int64_t num_tokens, int64_t num_heads, int64_t head_dim) {
  int64_t half = head_dim / 2;
#pragma omp parallel for schedule(static) if (num_tokens * num_heads * head_dim > 32768)
  for (int64_t token = 0; token < num_tokens; ++token) {
    const T* c = cos + token * head_dim;
    const T* s = sin + token * head_dim;
    for (int64_t head = 0; head < num_heads; ++head) {
      const T* in = heads + token * token_stride + head * head_stride;
      T* to = out + (token * num_heads + head) * head_dim;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        float first = to_float(in[i]), second = to_float(in[i + half]);
        to[i] = from_float<T>(first * to_float(c[i]) - second * to_float(s[i]));
        to[i + half] = from_float<T>(second * to_float(c[i + half]) + first * to_float(s[i + half]));
      }
    }
  }
}

template <typename T>
void silu_and_mul(const T* gate_up, T* out, int64_t num_rows, int64_t size) {
#pragma omp parallel for schedule(static) if (num_rows * size > 16384)
  for (int64_t row = 0; row < num_rows; ++row) {
    const T* gate = gate_up + row * 2 * size;
    const T* up = gate + size;
    T* to = out + row * size;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      float g = to_float(gate[i]);
      to[i] = from_float<T>(to_float(from_float<T>(g / (1.0f + fast_exp(-g)))) * to_float(up[i]));
    }
  }
}

}  // namespace

#define PENSTOCK_LAYER_OPS(T, suffix)                                                                               \
  extern "C" void rms_norm_##suffix(const T* inputs, int64_t stride, T* residual, const T* weight,                  \
                                    int64_t weight_rows, T* out, int64_t num_rows, int64_t size, float eps) {      \
    rms_norm<T>(inputs, stride, residual, weight, weight_rows, out, num_rows, size, eps);                          \
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
