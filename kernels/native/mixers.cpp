#include "mixers.h"

#include <algorithm>
#include <vector>

#include "layer_ops.h"
#include "parallel.h"
#include "recurrence.h"

namespace {

constexpr int64_t CHANNELS_PER_PIECE = 256;
constexpr int64_t TOKENS_PER_PIECE = 8;
constexpr int64_t MAX_DIM = 512;
constexpr float SMALLEST_LENGTH = 1e-6f;  // of keys and queries, squared

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <typename T>
float rounded(float value) {
  return to_float(from_float<T>(value));
}

// Kept from step to step; of the calling thread, which all pieces of work are given a part of. Which: one of several.
template <typename T, int Which = 0>
T* scratch(int64_t num) {
  static thread_local std::vector<T> kept;
  if (static_cast<int64_t>(kept.size()) < num) kept.resize(num);
  return kept.data();
}

template <typename T>
class Mix {
 public:
  Mix(const Mixer& mixer, const MixerStep& step, const T* rows, int64_t stride, T* out, int64_t out_stride)
      : m_(mixer),
        s_(step),
        rows_(rows),
        stride_(stride),
        out_(out),
        out_stride_(out_stride),
        mixed_(scratch<T>(step.num_tokens * mixer.num_channels)) {
    for (int64_t b = 0, token = 0; b < s_.num_requests; token += s_.query_lens[b++]) first_tokens_.push_back(token);
  }

  void all() {
    if (m_.order) order_columns();
    if (m_.kind == MixerKind::CONVOLUTION) {
      multiply_inputs();
      convolve([this](int64_t token, int64_t channel, const float* sums, int64_t num) {
        const T* gate = rows_ + token * stride_ + m_.gate_at + channel;
        T* to = out_ + token * out_stride_ + channel;
#pragma omp simd
        for (int64_t c = 0; c < num; ++c) to[c] = from_float<T>(to_float(from_float<T>(sums[c])) * to_float(gate[c]));
      });
      return;
    }
    convolve([this](int64_t token, int64_t channel, const float* sums, int64_t num) {
      T* to = mixed_ + token * m_.num_channels + channel;
#pragma omp simd
      for (int64_t c = 0; c < num; ++c) to[c] = from_float<T>(Silu::of(to_float(from_float<T>(sums[c]))));
    });
    for_each(s_.num_requests * m_.num_heads, [this](int64_t item) { recur(item / m_.num_heads, item % m_.num_heads); });
    for_ranges(s_.num_tokens, TOKENS_PER_PIECE, [this](int64_t start, int64_t end) {
      for (int64_t token = start; token < end; ++token) norm_and_gate(token);
    });
  }

 private:
  void order_columns() {
    T* ordered = scratch<T, 1>(s_.num_tokens * stride_);
    for_ranges(s_.num_tokens, TOKENS_PER_PIECE, [this, ordered](int64_t start, int64_t end) {
      for (int64_t token = start; token < end; ++token) {
        const T* from = rows_ + token * stride_;
        for (int64_t c = 0; c < stride_; ++c) ordered[token * stride_ + c] = from[m_.order[c]];
      }
    });
    rows_ = ordered;
  }

  void multiply_inputs() {
    for_ranges(s_.num_tokens, TOKENS_PER_PIECE, [this](int64_t start, int64_t end) {
      for (int64_t token = start; token < end; ++token) {
        const T *some = rows_ + token * stride_ + m_.values_at, *others = rows_ + token * stride_ + m_.strength_at;
        T* to = mixed_ + token * m_.num_channels;
#pragma omp simd
        for (int64_t c = 0; c < m_.num_channels; ++c) to[c] = from_float<T>(to_float(some[c]) * to_float(others[c]));
      }
    });
  }

  // What the convolution is given at a place of a request, below 0 before this step; null before the request.
  const T* input_at(int64_t request, int64_t place) const {
    if (place < 0) {
      const int64_t before = m_.num_taps - 1, slot = s_.reads[request];
      return slot < 0 ? nullptr : recent_of(slot) + (before + place) * m_.num_channels;
    }
    const int64_t token = first_tokens_[request] + place;
    return m_.kind == MixerKind::CONVOLUTION ? mixed_ + token * m_.num_channels : rows_ + token * stride_ + m_.values_at;
  }

  T* recent_of(int64_t slot) const { return static_cast<T*>(m_.recent) + slot * (m_.num_taps - 1) * m_.num_channels; }

  // Hands put(token, first channel, sums, how many) what the convolution makes, and keeps what it was given last.
  template <typename Put>
  void convolve(const Put& put) {
    const int64_t pieces = (m_.num_channels + CHANNELS_PER_PIECE - 1) / CHANNELS_PER_PIECE;
    for_each(s_.num_requests * pieces, [&](int64_t item) {
      const int64_t request = item / pieces, channel = item % pieces * CHANNELS_PER_PIECE;
      const int64_t num = std::min(CHANNELS_PER_PIECE, m_.num_channels - channel), tokens = s_.query_lens[request];
      float sums[CHANNELS_PER_PIECE];
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t c = 0; c < num; ++c) sums[c] = m_.taps_bias ? m_.taps_bias[channel + c] : 0.0f;
        for (int64_t tap = 0; tap < m_.num_taps; ++tap) {
          const T* from = input_at(request, t + tap - (m_.num_taps - 1));
          const float* weights = m_.taps + tap * m_.num_channels + channel;
          if (!from) continue;
#pragma omp simd
          for (int64_t c = 0; c < num; ++c) sums[c] += weights[c] * to_float(from[channel + c]);
        }
        put(first_tokens_[request] + t, channel, sums, num);
      }
      for (int64_t i = 0; i < m_.num_taps - 1; ++i) {
        const T* from = input_at(request, tokens - (m_.num_taps - 1) + i);
        T* to = recent_of(s_.writes[request]) + i * m_.num_channels + channel;
        for (int64_t c = 0; c < num; ++c) to[c] = from ? from[channel + c] : from_float<T>(0.0f);
      }
    });
  }

  // One head of a request over its tokens.
  void recur(int64_t request, int64_t head) {
    const int64_t size = m_.key_dim * m_.head_dim, slot = s_.reads[request];
    const float* from = slot < 0 ? nullptr : m_.states + (slot * m_.num_heads + head) * size;
    float* to = m_.states + (s_.writes[request] * m_.num_heads + head) * size;
    const float rate = -std::exp(m_.decay[head]);
    float key[MAX_KEY_DIM], query[MAX_KEY_DIM], value[MAX_DIM], found[MAX_DIM];
    const float least = s_.query_lens[request] == 1 && from ? 0.0f : m_.smallest_step;
    for (int64_t t = 0; t < s_.query_lens[request]; ++t, from = to) {
      const int64_t token = first_tokens_[request] + t;
      const Change change = m_.kind == MixerKind::DELTA_RULE ? delta_of(token, head, rate, key, query, value)
                                                  : scan_of(token, head, rate, least, key, query, value);
      change_state(change, from, to, m_.key_dim, m_.head_dim, value, found);
      const float skip = m_.kind == MixerKind::SCAN ? m_.skip[head] : 0.0f;
      T* out = out_ + token * out_stride_ + head * m_.head_dim;
      for (int64_t j = 0; j < m_.head_dim; ++j) out[j] = from_float<T>(found[j] + skip * value[j]);
    }
  }

  // Queries and keys of a length of one; a row of the convolution has queries, keys and values.
  Change delta_of(int64_t token, int64_t head, float rate, float* key, float* query, float* value) const {
    const T *row = rows_ + token * stride_, *mixed = mixed_ + token * m_.num_channels;
    const int64_t group = head / (m_.num_heads / m_.num_groups), all_keys = m_.num_groups * m_.key_dim;
    unit(mixed + group * m_.key_dim, query, 1.0f / std::sqrt(static_cast<float>(m_.key_dim)));
    unit(mixed + all_keys + group * m_.key_dim, key, 1.0f);
    take(mixed + 2 * all_keys + head * m_.head_dim, value, m_.head_dim);
    const float strength = rounded<T>(1.0f / (1.0f + std::exp(-to_float(row[m_.strength_at + head]))));
    const float step = softplus(to_float(row[m_.step_at + head]) + m_.step_bias[head]);
    return {key, query, std::exp(rate * step), strength, true};
  }

  // A row of the convolution has values, keys and queries.
  Change scan_of(int64_t token, int64_t head, float rate, float least, float* key, float* query, float* value) const {
    const T *row = rows_ + token * stride_, *mixed = mixed_ + token * m_.num_channels;
    const int64_t group = head / (m_.num_heads / m_.num_groups), all_values = m_.num_heads * m_.head_dim;
    take(mixed + head * m_.head_dim, value, m_.head_dim);
    take(mixed + all_values + group * m_.key_dim, key, m_.key_dim);
    take(mixed + all_values + (m_.num_groups + group) * m_.key_dim, query, m_.key_dim);
    const float raw = rounded<T>(to_float(row[m_.step_at + head]) + m_.step_bias[head]);
    const float step = std::max(rounded<T>(softplus(raw)), rounded<T>(least));
    for (int64_t i = 0; i < m_.key_dim; ++i) key[i] *= step;
    return {key, query, std::exp(rate * step), 1.0f, false};
  }

  static void take(const T* from, float* to, int64_t num) {
    for (int64_t i = 0; i < num; ++i) to[i] = to_float(from[i]);
  }

  void unit(const T* from, float* to, float scale) const {
    take(from, to, m_.key_dim);
    float sum = 0;
    for (int64_t i = 0; i < m_.key_dim; ++i) sum += to[i] * to[i];
    const float factor = scale / std::sqrt(sum + SMALLEST_LENGTH);
    for (int64_t i = 0; i < m_.key_dim; ++i) to[i] *= factor;
  }

  void norm_and_gate(int64_t token) const {
    const int64_t size = m_.norm_size;
    T* row = out_ + token * out_stride_;
    const T* gates = rows_ + token * stride_ + m_.gate_at;
    for (int64_t start = 0; start < m_.num_heads * m_.head_dim; start += size) {
      T* values = row + start;
      const T* gate = gates + start;
      const float* weight = m_.norm + start % m_.norm_weights;
      float sum = 0;
      for (int64_t i = 0; i < size; ++i) {
        const float value = to_float(values[i]) * (m_.gates_first ? Silu::of(to_float(gate[i])) : 1.0f);
        sum += value * value;
      }
      const float factor = 1.0f / std::sqrt(sum / size + m_.eps);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        const float open = Silu::of(to_float(gate[i])), value = to_float(values[i]);
        const float scaled = rounded<T>((m_.gates_first ? value * open : value) * factor);
        const float weighted = rounded<T>(scaled * weight[i]);
        values[i] = from_float<T>(m_.gates_first ? weighted : weighted * open);
      }
    }
  }

  const Mixer& m_;
  const MixerStep& s_;
  const T* rows_;
  const int64_t stride_;
  T* out_;
  const int64_t out_stride_;
  T* mixed_;  // [T, C]: what the convolution is given, or what it makes
  std::vector<int64_t> first_tokens_;
};

}  // namespace

template <typename T>
void mix(const Mixer& mixer, const MixerStep& step, const T* rows, int64_t stride, T* out, int64_t out_stride) {
  Mix<T>(mixer, step, rows, stride, out, out_stride).all();
}

template void mix(const Mixer&, const MixerStep&, const float*, int64_t, float*, int64_t);
template void mix(const Mixer&, const MixerStep&, const bfloat16*, int64_t, bfloat16*, int64_t);

#define PENSTOCK_MIX(T, suffix)                                                                                         \
  extern "C" void mix_##suffix(const Mixer* mixer, const MixerStep* step, const T* rows, int64_t stride, T* out,        \
                               int64_t out_stride) {                                                                    \
    mix(*mixer, *step, rows, stride, out, out_stride);                                                                  \
  }

PENSTOCK_MIX(float, float32)
PENSTOCK_MIX(bfloat16, bfloat16)
