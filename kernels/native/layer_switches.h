// What layers do to a row in one way or another, as their description says.
#pragma once
#include "layer_ops.h"

// How a row is normalised: not at all; by its root mean square, rounded before the weight, which is of the model's dtype,
// or after, the weight being a float; by mean and deviation, the weight being a float.
enum class NormKind : int64_t { NONE, RMS, WIDE_RMS, CENTRED };

struct Norm {
  const void *weight, *bias;  // [size]; the bias, of floats, may be null
  NormKind kind;
  float eps;
};

// In the order of kernels/gated_activation.
enum class Activation : int64_t { SILU, GELU_TANH, GELU, RELU2 };

// Weights begin at an offset. out may be values.
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

// Of size outputs; a gate lies before what it opens for.
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
