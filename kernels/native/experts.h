// Mixtures of experts: which experts a token goes to, and what they make of it.
#pragma once
#include "layer_switches.h"
#include "linear.h"

constexpr int64_t MAX_EXPERTS = 1024;

// As kernels/decoder has it, too.
struct Experts {
  Linear router;                 // of floats
  const float* choice_bias;      // [num_experts], of scores, but only where experts are chosen; or null
  const Linear *gate_up, *down;  // of each expert
  Linear shared_gate;  // one number, whose sigmoid opens for what is beside the experts; without inputs that is open
  int64_t num_experts, num_chosen;
  int64_t has_sigmoids;  // scores are these of logits; else their softmax
  int64_t renormalizes;  // what those chosen count has a sum of one
  int64_t rounds_logits, rounds_weights;  // to the model's dtype
  Activation activation;
  int64_t is_gated;
  float scale;         // of what experts count
  float alpha, limit;  // of an activation of pairs; a limit of 0: gate and up are halves, as elsewhere
  // Of what the router is given, and experts; of what experts make, and what is beside them. Without an input_norm experts
  // and router are given the inputs, else the stream.
  Norm router_norm, input_norm, out_norm, shared_norm;
  const float *input_scale, *expert_scale;  // [size], of what the router is given, and [num_experts], of counts; or null
  float input_factor;                       // of the former
};

// out [num_rows, size] = what the experts make of inputs, or of the stream, of the same shape, added to what out has if
// adds. In experts.cpp for float and bfloat16.
template <typename T>
void mix_experts(const Experts& experts, const T* inputs, const T* stream, int64_t size, T* out, bool adds,
                 int64_t num_rows);
