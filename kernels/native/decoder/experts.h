// Mixtures of experts: routing of tokens, and the weighted sum of the outputs of their experts.
#pragma once
#include "decoder/layer_switches.h"
#include "products/linear.h"

constexpr int64_t MAX_EXPERTS = 1024;

// Matches ExpertsStruct in kernels/decoder.
struct Experts {
  Linear router;                 // with float inputs
  const float* choice_bias;      // [num_experts], added to scores to choose experts only; or null
  const Linear *gate_up, *down;  // projections of each expert
  Linear shared_gate;  // to one value, whose sigmoid gates the dense MLP; without inputs no gate
  int64_t num_experts, num_chosen;
  int64_t has_sigmoids;  // scores are sigmoids of the logits; else their softmax
  int64_t renormalizes;  // the weights of the chosen experts sum to one
  int64_t rounds_logits, rounds_weights;  // round to the model's dtype
  Activation activation;
  int64_t is_gated;
  float scale;         // factor on the weights of experts
  float alpha, limit;  // of clamped gates, interleaved with up; limit 0 for activation and is_gated
  // Norms of the inputs of router and experts, and of the outputs of the experts and of the dense MLP. With input_norm,
  // experts and router read the stream, else the input of the dense MLP.
  Norm router_norm, input_norm, out_norm, shared_norm;
  const float *input_scale, *expert_scale;  // [size], of the router's input; [num_experts]; or null
  float input_factor;                       // of the router's input
};

// Writes the weighted outputs of the experts to out [num_rows, size], or adds them if adds. inputs and stream have the
// same shape as out. Instantiated in experts.cpp for float and bfloat16.
template <typename T>
void mix_experts(const Experts& experts, const T* inputs, const T* stream, int64_t size, T* out, bool adds,
                 int64_t num_rows);
