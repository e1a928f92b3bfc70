// Norms and activations of a row, selected by kind.
#pragma once
#include "decoder/layer_ops.h"

// NONE: copies. RMS: root mean square, rounded before the product with a weight in the model's dtype. WIDE_RMS: root
// mean square with a float weight, rounded after the product. CENTRED: mean and deviation, with a float weight. Matches
// NormKind in kernels/decoder/structs.py.
enum class NormKind : int64_t { NONE, RMS, WIDE_RMS, CENTRED };

struct Norm {
  const void *weight, *bias;  // [size]; the bias is float, or null
  NormKind kind;
  float eps;
};

// In the order of ACTIVATIONS in kernels/gated_activation.
enum class Activation : int64_t { SILU, GELU_TANH, GELU, RELU2 };

// Uses the weights from offset on. out may be values.
template <typename T>
void apply_norm(const Norm& norm, const T* values, T* out, int64_t size, int64_t offset = 0) {
  const float* floats = static_cast<const float*>(norm.weight) + offset;
  switch (norm.kind) {
    case NormKind::NONE:
      if (out != values) std::memcpy(out, values, size * sizeof(T));
      break;
    case NormKind::RMS:
      norm_row(values, static_cast<const T*>(norm.weight) + offset, out, size, norm.eps);
      break;
    case NormKind::WIDE_RMS:
      norm_row(values, floats, out, size, norm.eps);
      break;
    default:
      const float* bias = norm.bias ? static_cast<const float*>(norm.bias) + offset : nullptr;
      centred_norm_row(values, floats, bias, out, size, norm.eps);
  }
}

// Writes size outputs; a gated row holds size gates, then size values.
template <typename A, typename T>
void activate_row(bool is_gated, const T* from, T* out, int64_t size) {
  is_gated ? gate_row<A>(from, out, size) : activate_row<A>(from, out, size);
}

template <typename T>
void activate_row(Activation activation, bool is_gated, const T* from, T* out, int64_t size) {
  switch (activation) {
    case Activation::SILU:
      return activate_row<Silu>(is_gated, from, out, size);
    case Activation::GELU_TANH:
      return activate_row<GeluTanh>(is_gated, from, out, size);
    case Activation::GELU:
      return activate_row<Gelu>(is_gated, from, out, size);
    default:
      return activate_row<SquaredRelu>(is_gated, from, out, size);
  }
}
