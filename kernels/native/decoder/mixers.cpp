#include "decoder/mixers.h"

#include <algorithm>
#include <vector>

#include "base/parallel.h"
#include "decoder/layer_ops.h"
#include "decoder/recurrence.h"

namespace {

constexpr int64_t CHANNELS_PER_PIECE = 256;
constexpr int64_t TOKENS_PER_PIECE = 8;
constexpr int64_t MAX_DIM = 512;
constexpr float SMALLEST_LENGTH = 1e-6f;  // added to the squared length of keys and queries

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <typename T>
float rounded(float value) {
  return to_float(from_float<T>(value));
}

// Buffer of the calling thread, reused from step to step. Each piece of work uses a part of it. Which selects one of
// several buffers.
template <typename T, int Which = 0>
T* scratch(int64_t num) {
  static thread_local std::vector<T> buffer;
  if (static_cast<int64_t>(buffer.size()) < num) buffer.resize(num);
  return buffer.data();
}

template <typename T>
class Mix {
 public:
  Mix(const Mixer& mixer, const MixerStep& step, const T* rows, int64_t stride, T* out, int64_t out_stride)
      : mixer_(mixer),
        step_(step),
        rows_(rows),
        stride_(stride),
        out_(out),
        out_stride_(out_stride),
        convolved_(scratch<T>(step.num_tokens * mixer.num_channels)) {
    for (int64_t b = 0, token = 0; b < step_.num_requests; token += step_.query_lens[b++]) {
      first_tokens_.push_back(token);
    }
  }

  void run() {
    if (mixer_.order) order_columns();
    if (mixer_.kind == MixerKind::CONVOLUTION) {
      multiply_inputs();
      convolve([this](int64_t token, int64_t channel, const float* sums, int64_t num) {
        const T* gate = rows_ + token * stride_ + mixer_.gate_at + channel;
        T* to = out_ + token * out_stride_ + channel;
#pragma omp simd
        for (int64_t c = 0; c < num; ++c) to[c] = from_float<T>(to_float(from_float<T>(sums[c])) * to_float(gate[c]));
      });
      return;
    }
    convolve([this](int64_t token, int64_t channel, const float* sums, int64_t num) {
      T* to = convolved_ + token * mixer_.num_channels + channel;
#pragma omp simd
      for (int64_t c = 0; c < num; ++c) to[c] = from_float<T>(Silu::of(to_float(from_float<T>(sums[c]))));
    });
    for_each(step_.num_requests * mixer_.num_heads,
             [this](int64_t item) { recur(item / mixer_.num_heads, item % mixer_.num_heads); });
    for_ranges(step_.num_tokens, TOKENS_PER_PIECE, [this](int64_t start, int64_t end) {
      for (int64_t token = start; token < end; ++token) norm_and_gate(token);
    });
  }

 private:
  void order_columns() {
    T* ordered = scratch<T, 1>(step_.num_tokens * stride_);
    for_ranges(step_.num_tokens, TOKENS_PER_PIECE, [this, ordered](int64_t start, int64_t end) {
      for (int64_t token = start; token < end; ++token) {
        const T* from = rows_ + token * stride_;
        for (int64_t c = 0; c < stride_; ++c) ordered[token * stride_ + c] = from[mixer_.order[c]];
      }
    });
    rows_ = ordered;
  }

  void multiply_inputs() {
    for_ranges(step_.num_tokens, TOKENS_PER_PIECE, [this](int64_t start, int64_t end) {
      for (int64_t token = start; token < end; ++token) {
        const T* row = rows_ + token * stride_;
        const T *values = row + mixer_.values_at, *strengths = row + mixer_.strength_at;
        T* to = convolved_ + token * mixer_.num_channels;
#pragma omp simd
        for (int64_t c = 0; c < mixer_.num_channels; ++c) {
          to[c] = from_float<T>(to_float(values[c]) * to_float(strengths[c]));
        }
      }
    });
  }

  // Returns the input of the convolution at an index of a request, negative before this step; null before the request.
  const T* input_at(int64_t request, int64_t place) const {
    if (place < 0) {
      const int64_t before = mixer_.num_taps - 1, slot = step_.reads[request];
      return slot < 0 ? nullptr : recent_inputs(slot) + (before + place) * mixer_.num_channels;
    }
    const int64_t token = first_tokens_[request] + place;
    if (mixer_.kind == MixerKind::CONVOLUTION) return convolved_ + token * mixer_.num_channels;
    return rows_ + token * stride_ + mixer_.values_at;
  }

  T* recent_inputs(int64_t slot) const {
    return static_cast<T*>(mixer_.recent) + slot * (mixer_.num_taps - 1) * mixer_.num_channels;
  }

  // Calls put(token, first channel, sums, number of channels) with the outputs of the convolution, and stores its
  // latest inputs in the state.
  template <typename Put>
  void convolve(const Put& put) {
    const int64_t pieces = (mixer_.num_channels + CHANNELS_PER_PIECE - 1) / CHANNELS_PER_PIECE;
    for_each(step_.num_requests * pieces, [&](int64_t item) {
      const int64_t request = item / pieces, channel = item % pieces * CHANNELS_PER_PIECE;
      const int64_t num = std::min(CHANNELS_PER_PIECE, mixer_.num_channels - channel);
      const int64_t tokens = step_.query_lens[request];
      float sums[CHANNELS_PER_PIECE];
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t c = 0; c < num; ++c) sums[c] = mixer_.taps_bias ? mixer_.taps_bias[channel + c] : 0.0f;
        for (int64_t tap = 0; tap < mixer_.num_taps; ++tap) {
          const T* from = input_at(request, t + tap - (mixer_.num_taps - 1));
          const float* weights = mixer_.taps + tap * mixer_.num_channels + channel;
          if (!from) continue;
#pragma omp simd
          for (int64_t c = 0; c < num; ++c) sums[c] += weights[c] * to_float(from[channel + c]);
        }
        put(first_tokens_[request] + t, channel, sums, num);
      }
      for (int64_t i = 0; i < mixer_.num_taps - 1; ++i) {
        const T* from = input_at(request, tokens - (mixer_.num_taps - 1) + i);
        T* to = recent_inputs(step_.writes[request]) + i * mixer_.num_channels + channel;
        for (int64_t c = 0; c < num; ++c) to[c] = from ? from[channel + c] : from_float<T>(0.0f);
      }
    });
  }

  // Runs the recurrence of one head over the tokens of a request.
  void recur(int64_t request, int64_t head) {
    const int64_t size = mixer_.key_dim * mixer_.head_dim, slot = step_.reads[request];
    const float* from = slot < 0 ? nullptr : mixer_.states + (slot * mixer_.num_heads + head) * size;
    float* to = mixer_.states + (step_.writes[request] * mixer_.num_heads + head) * size;
    const float rate = -std::exp(mixer_.decay[head]);
    float key[MAX_KEY_DIM], query[MAX_KEY_DIM], value[MAX_DIM], mixed_value[MAX_DIM];
    const float smallest_step = step_.query_lens[request] == 1 && from ? 0.0f : mixer_.smallest_step;
    for (int64_t t = 0; t < step_.query_lens[request]; ++t, from = to) {
      const int64_t token = first_tokens_[request] + t;
      const Change change = mixer_.kind == MixerKind::DELTA_RULE ? delta_change(token, head, rate, key, query, value)
                                                  : scan_change(token, head, rate, smallest_step, key, query, value);
      change_state(change, from, to, mixer_.key_dim, mixer_.head_dim, value, mixed_value);
      const float skip = mixer_.kind == MixerKind::SCAN ? mixer_.skip[head] : 0.0f;
      T* out = out_ + token * out_stride_ + head * mixer_.head_dim;
      for (int64_t j = 0; j < mixer_.head_dim; ++j) out[j] = from_float<T>(mixed_value[j] + skip * value[j]);
    }
  }

  // Queries and keys have unit length. A row of the convolution holds queries, keys and values.
  Change delta_change(int64_t token, int64_t head, float rate, float* key, float* query, float* value) const {
    const T *row = rows_ + token * stride_, *mixed = convolved_ + token * mixer_.num_channels;
    const int64_t group = head / (mixer_.num_heads / mixer_.num_groups), all_keys = mixer_.num_groups * mixer_.key_dim;
    normalize(mixed + group * mixer_.key_dim, query, 1.0f / std::sqrt(static_cast<float>(mixer_.key_dim)));
    normalize(mixed + all_keys + group * mixer_.key_dim, key, 1.0f);
    load(mixed + 2 * all_keys + head * mixer_.head_dim, value, mixer_.head_dim);
    const float strength = rounded<T>(1.0f / (1.0f + std::exp(-to_float(row[mixer_.strength_at + head]))));
    const float step = softplus(to_float(row[mixer_.step_at + head]) + mixer_.step_bias[head]);
    return {key, query, std::exp(rate * step), strength, true};
  }

  // A row of the convolution holds values, keys and queries.
  Change scan_change(int64_t token, int64_t head, float rate, float smallest_step, float* key, float* query,
                     float* value) const {
    const T *row = rows_ + token * stride_, *mixed = convolved_ + token * mixer_.num_channels;
    const int64_t group = head / (mixer_.num_heads / mixer_.num_groups);
    const int64_t all_values = mixer_.num_heads * mixer_.head_dim;
    load(mixed + head * mixer_.head_dim, value, mixer_.head_dim);
    load(mixed + all_values + group * mixer_.key_dim, key, mixer_.key_dim);
    load(mixed + all_values + (mixer_.num_groups + group) * mixer_.key_dim, query, mixer_.key_dim);
    const float raw = rounded<T>(to_float(row[mixer_.step_at + head]) + mixer_.step_bias[head]);
    const float step = std::max(rounded<T>(softplus(raw)), rounded<T>(smallest_step));
    for (int64_t i = 0; i < mixer_.key_dim; ++i) key[i] *= step;
    return {key, query, std::exp(rate * step), 1.0f, false};
  }

  static void load(const T* from, float* to, int64_t num) {
    for (int64_t i = 0; i < num; ++i) to[i] = to_float(from[i]);
  }

  void normalize(const T* from, float* to, float scale) const {
    load(from, to, mixer_.key_dim);
    float sum = 0;
    for (int64_t i = 0; i < mixer_.key_dim; ++i) sum += to[i] * to[i];
    const float factor = scale / std::sqrt(sum + SMALLEST_LENGTH);
    for (int64_t i = 0; i < mixer_.key_dim; ++i) to[i] *= factor;
  }

  void norm_and_gate(int64_t token) const {
    const int64_t size = mixer_.norm_size;
    T* row = out_ + token * out_stride_;
    const T* gates = rows_ + token * stride_ + mixer_.gate_at;
    for (int64_t start = 0; start < mixer_.num_heads * mixer_.head_dim; start += size) {
      T* values = row + start;
      const T* gate = gates + start;
      const float* weight = mixer_.norm + start % mixer_.norm_weights;
      float sum = 0;
      for (int64_t i = 0; i < size; ++i) {
        const float value = to_float(values[i]) * (mixer_.gates_first ? Silu::of(to_float(gate[i])) : 1.0f);
        sum += value * value;
      }
      const float factor = 1.0f / std::sqrt(sum / size + mixer_.eps);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        const float open = Silu::of(to_float(gate[i])), value = to_float(values[i]);
        const float scaled = rounded<T>((mixer_.gates_first ? value * open : value) * factor);
        const float weighted = rounded<T>(scaled * weight[i]);
        values[i] = from_float<T>(mixer_.gates_first ? weighted : weighted * open);
      }
    }
  }

  const Mixer& mixer_;
  const MixerStep& step_;
  const T* rows_;
  const int64_t stride_;
  T* out_;
  const int64_t out_stride_;
  T* convolved_;  // [T, C]: inputs of a CONVOLUTION, else outputs of the convolution
  std::vector<int64_t> first_tokens_;
};

}  // namespace

template <typename T>
void mix(const Mixer& mixer, const MixerStep& step, const T* rows, int64_t stride, T* out, int64_t out_stride) {
  Mix<T>(mixer, step, rows, stride, out, out_stride).run();
}

template void mix(const Mixer&, const MixerStep&, const float*, int64_t, float*, int64_t);
template void mix(const Mixer&, const MixerStep&, const bfloat16*, int64_t, bfloat16*, int64_t);

#define PENSTOCK_MIX(T, suffix)                                                                                        \
  extern "C" void mix_##suffix(const Mixer* mixer, const MixerStep* step, const T* rows, int64_t stride, T* out,       \
                               int64_t out_stride) {                                                                   \
    mix(*mixer, *step, rows, stride, out, out_stride);                                                                 \
  }

PENSTOCK_MIX(float, float32)
PENSTOCK_MIX(bfloat16, bfloat16)
