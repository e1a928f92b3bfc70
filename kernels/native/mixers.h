// Layers that keep a state of each request in the place of keys and values: short convolutions, and recurrences over
// tokens.
#pragma once
#include <cstdint>

#include "scalar.h"

enum class MixerKind : int64_t { CONVOLUTION, DELTA_RULE, SCAN };

// As kernels/mixers has it. Places (…_at) are columns of a row of the layer's projection.
struct Mixer {
  MixerKind kind;
  // What the convolution is given: num_channels from values_at on; of a CONVOLUTION times as many from strength_at on.
  int64_t num_taps, num_channels;
  int64_t num_heads, num_groups;  // groups share what a recurrence is asked by and what it keeps values under
  int64_t head_dim, key_dim;      // of a head's values, a multiple of LANES; of what they are kept under
  int64_t values_at, gate_at, strength_at, step_at;
  int64_t norm_size, norm_weights, gates_first;  // columns that are normalised together; weights repeat
  float eps;
  float smallest_step;  // of a SCAN's tokens, but for one that follows a state alone: so transformers has it
  const float *taps, *taps_bias;          // [num_taps, num_channels]; [num_channels] or null
  const float *decay, *step_bias, *skip;  // [num_heads], the first as a logarithm; the last of a SCAN
  const float* norm;                      // [norm_weights]
  const int64_t* order;  // columns of the projection, in the order in which places above count; null as they come
  void* recent;   // [slots, num_taps - 1, num_channels] of the model's dtype: what the convolution was given last
  float* states;  // [slots, num_heads, key_dim, head_dim]
};

// The packed tokens of some requests. A request's state is read from one slot, below 0 from none, and written to another.
struct MixerStep {
  int64_t num_tokens, num_requests;
  const int64_t *query_lens, *reads, *writes;  // [B]
};

// From rows of the projection to what the output projection is given. In mixers.cpp for float and bfloat16.
template <typename T>
void mix(const Mixer& mixer, const MixerStep& step, const T* rows, int64_t stride, T* out, int64_t out_stride);
