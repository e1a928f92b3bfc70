// Layers that keep a recurrent state per request instead of keys and values: short convolutions, and recurrences over
// tokens.
#pragma once
#include <cstdint>

#include "base/scalar.h"

enum class MixerKind : int64_t { CONVOLUTION, DELTA_RULE, SCAN };

// Matches MixerStruct in kernels/mixers. Fields named …_at are columns of a row of the layer's projection.
struct Mixer {
  MixerKind kind;
  // The convolution reads num_channels columns from values_at on; a CONVOLUTION multiplies them by those at
  // strength_at.
  int64_t num_taps, num_channels;
  int64_t num_heads, num_groups;  // heads of a group share queries and keys
  int64_t head_dim, key_dim;      // sizes of a head's values, a multiple of LANES, and of its keys
  int64_t values_at, gate_at, strength_at, step_at;
  int64_t norm_size, norm_weights, gates_first;  // columns normalised together; number of weights, which repeat
  float eps;
  float smallest_step;  // of a SCAN, except for a single token that follows a state, as in transformers
  const float *taps, *taps_bias;          // [num_taps, num_channels]; [num_channels] or null
  const float *decay, *step_bias, *skip;  // [num_heads]; the logarithm of the decay; skip for a SCAN only
  const float* norm;                      // [norm_weights]
  const int64_t* order;  // permutation of columns that the fields above refer to; null for none
  void* recent;   // [slots, num_taps - 1, num_channels] in the model's dtype: latest inputs
  float* states;  // [slots, num_heads, key_dim, head_dim]
};

// Packed tokens of requests. A request's state is read from one slot, negative for a new request, and written to
// another.
struct MixerStep {
  int64_t num_tokens, num_requests;
  const int64_t *query_lens, *reads, *writes;  // [B]
};

// Computes the input of the output projection from rows of the projection. Instantiated in mixers.cpp for float and
// bfloat16.
template <typename T>
void mix(const Mixer& mixer, const MixerStep& step, const T* rows, int64_t stride, T* out, int64_t out_stride);
