// Processes tokens expert by expert, so that each expert's weights are read once. See experts.h.
#include "decoder/experts.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/parallel.h"

namespace {

constexpr int64_t ROWS_PER_PIECE = 8;
constexpr float SMALLEST_SUM = 1e-20f;  // added to a sum of sigmoids, which may all be nearly 0

// Buffers of the calling thread, reused from step to step. Each piece of work uses a part of them.
template <typename T>
struct Buffers {
  std::vector<T> gathered, inner, gated, outputs, gates, normed;
  std::vector<float> widened, logits, sums, weights, sorted_weights;
  std::vector<int64_t> ids, tokens;

  static Buffers& thread_buffers() {
    static thread_local Buffers buffers;
    return buffers;
  }
};

template <typename Element>
Element* ensure_size(std::vector<Element>& buffer, int64_t num) {
  if (static_cast<int64_t>(buffer.size()) < num) buffer.resize(num);
  return buffer.data();
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Applies clamped gates; gate and up are interleaved.
template <typename T>
void clamped_gate_row(const T* pairs, T* out, int64_t size, float alpha, float limit) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    const float gate = std::min(to_float(pairs[2 * i]), limit);
    const float up = std::max(-limit, std::min(to_float(pairs[2 * i + 1]), limit));
    out[i] = from_float<T>((up + 1.0f) * gate / (1.0f + fast_exp(-alpha * gate)));
  }
}

// Computes one call. A row's bits do not depend on other rows: its experts are summed in the order of their index.
template <typename T>
class Mixture {
 public:
  Mixture(const Experts& experts, const T* inputs, const T* stream, int64_t size, int64_t num_rows)
      : experts_(experts),
        dense_inputs_(inputs),
        routed_(experts.input_norm.kind == NormKind::NONE ? inputs : stream),
        inputs_(routed_),
        size_(size),
        num_rows_(num_rows),
        buffers_(Buffers<T>::thread_buffers()) {
    sums_ = ensure_size(buffers_.sums, num_rows * size);
    ids_ = ensure_size(buffers_.ids, num_rows * experts_.num_chosen);
    weights_ = ensure_size(buffers_.weights, num_rows * experts_.num_chosen);
    const int64_t width = experts_.gate_up[0].num_outputs, inner = experts_.down[0].num_inputs;
    gathered_ = ensure_size(buffers_.gathered, num_rows * size);
    outputs_ = ensure_size(buffers_.outputs, num_rows * size);
    inner_ = ensure_size(buffers_.inner, num_rows * width);
    gated_ = ensure_size(buffers_.gated, num_rows * inner);
  }

  void run(T* out, bool adds) {
    route();
    if (experts_.input_norm.kind != NormKind::NONE) normalise_inputs();
    group_by_expert();
    for (int64_t expert = 0; expert < experts_.num_experts; ++expert) {
      if (starts_[expert] < starts_[expert + 1]) run_expert(expert);
    }
    write(out, adds);
  }

 private:
  template <typename Body>
  static void for_rows(int64_t num_rows, const Body& body) {
    for_ranges(num_rows, ROWS_PER_PIECE, [&](int64_t start, int64_t end) {
      for (int64_t row = start; row < end; ++row) body(row);
    });
  }

  void route() {
    float* widened = ensure_size(buffers_.widened, num_rows_ * size_);
    float* logits = ensure_size(buffers_.logits, num_rows_ * experts_.num_experts);
    T* normed = ensure_size(buffers_.normed, num_rows_ * size_);
    for_rows(num_rows_, [&](int64_t row) {
      T* router_input = normed + row * size_;
      apply_norm(experts_.router_norm, routed_ + row * size_, router_input, size_);
      for (int64_t i = 0; i < size_; ++i) widened[row * size_ + i] = scale_input(router_input[i], i);
      std::fill_n(sums_ + row * size_, size_, 0.0f);
    });
    multiply<float, float>(widened, size_, experts_.router, logits, experts_.num_experts, num_rows_);
    for_rows(num_rows_, [&](int64_t row) {
      const int64_t first = row * experts_.num_chosen;
      choose_experts(logits + row * experts_.num_experts, ids_ + first, weights_ + first);
    });
  }

  float scale_input(T value, int64_t i) const {
    if (!experts_.input_scale) return to_float(value);
    const T narrow = from_float<T>(to_float(value) * experts_.input_scale[i]);
    return to_float(from_float<T>(to_float(narrow) * experts_.input_factor));
  }

  // Normalises the input of the experts, after the router has read its input.
  void normalise_inputs() {
    T* normed = ensure_size(buffers_.normed, num_rows_ * size_);
    for_rows(num_rows_, [&](int64_t row) {
      apply_norm(experts_.input_norm, routed_ + row * size_, normed + row * size_, size_);
    });
    inputs_ = normed;
  }

  // Turns logits into scores, in place, then into the chosen experts and their weights.
  void choose_experts(float* logits, int64_t* ids, float* weights) const {
    const int64_t num = experts_.num_experts;
    if (experts_.rounds_logits) {
      for (int64_t x = 0; x < num; ++x) logits[x] = to_float(from_float<T>(logits[x]));
    }
    score(logits, num);
    bool is_chosen[MAX_EXPERTS] = {};
    float sum = experts_.has_sigmoids ? SMALLEST_SUM : 0.0f;
    for (int64_t j = 0; j < experts_.num_chosen; ++j) {
      ids[j] = best_expert(logits, is_chosen);
      is_chosen[ids[j]] = true;
      weights[j] = logits[ids[j]];
      sum += weights[j];
    }
    for (int64_t j = 0; j < experts_.num_chosen; ++j) {
      const float expert_scale = experts_.expert_scale ? experts_.expert_scale[ids[j]] : 1.0f;
      const float weight = (experts_.renormalizes ? weights[j] / sum : weights[j]) * experts_.scale * expert_scale;
      weights[j] = experts_.rounds_weights ? to_float(from_float<T>(weight)) : weight;
    }
  }

  void score(float* logits, int64_t num) const {
    if (experts_.has_sigmoids) {
      for (int64_t x = 0; x < num; ++x) logits[x] = sigmoid(logits[x]);
      return;
    }
    const float largest = *std::max_element(logits, logits + num);
    float sum = 0;
    for (int64_t x = 0; x < num; ++x) sum += logits[x] = std::exp(logits[x] - largest);
    for (int64_t x = 0; x < num; ++x) logits[x] /= sum;
  }

  // Returns the first of equal scores. With NaN scores it returns any expert, so that there always is one.
  int64_t best_expert(const float* scores, const bool* is_chosen) const {
    int64_t best = -1;
    float best_score = 0;
    for (int64_t x = 0; x < experts_.num_experts; ++x) {
      if (is_chosen[x]) continue;
      const float biased = scores[x] + (experts_.choice_bias ? experts_.choice_bias[x] : 0.0f);
      if (best < 0 || biased > best_score) best = x, best_score = biased;
    }
    return best;
  }

  // Sorts tokens by expert, stably.
  void group_by_expert() {
    const int64_t num = num_rows_ * experts_.num_chosen;
    tokens_ = ensure_size(buffers_.tokens, num);
    sorted_weights_ = ensure_size(buffers_.sorted_weights, num);
    std::fill_n(starts_, experts_.num_experts + 1, 0);
    for (int64_t i = 0; i < num; ++i) ++starts_[ids_[i] + 1];
    for (int64_t x = 0; x < experts_.num_experts; ++x) starts_[x + 1] += starts_[x];
    int64_t next[MAX_EXPERTS];
    std::copy(starts_, starts_ + experts_.num_experts, next);
    for (int64_t i = 0; i < num; ++i) {
      const int64_t place = next[ids_[i]]++;
      tokens_[place] = i / experts_.num_chosen;
      sorted_weights_[place] = weights_[i];
    }
  }

  void run_expert(int64_t expert) {
    const int64_t first = starts_[expert], num = starts_[expert + 1] - first;
    const int64_t* tokens = tokens_ + first;
    const Linear &gate_up = experts_.gate_up[expert], &down = experts_.down[expert];
    const int64_t width = gate_up.num_outputs, inner = down.num_inputs;
    for_rows(num, [&](int64_t i) {
      std::memcpy(gathered_ + i * size_, inputs_ + tokens[i] * size_, size_ * sizeof(T));
    });
    multiply<T, T>(gathered_, size_, gate_up, inner_, width, num);
    for_rows(num, [&](int64_t i) {
      const T* source = inner_ + i * width;
      T* target = gated_ + i * inner;
      if (experts_.limit > 0) {
        clamped_gate_row(source, target, inner, experts_.alpha, experts_.limit);
      } else {
        activate_row(experts_.activation, experts_.is_gated, source, target, inner);
      }
    });
    multiply<T, T>(gated_, inner, down, outputs_, size_, num);
    for_rows(num, [&](int64_t i) {
      const T* outputs = outputs_ + i * size_;
      float* sums = sums_ + tokens[i] * size_;
      const float weight = sorted_weights_[first + i];
#pragma omp simd
      for (int64_t c = 0; c < size_; ++c) sums[c] += weight * to_float(outputs[c]);
    });
  }

  void write(T* out, bool adds) {
    T* gates = nullptr;
    if (adds && experts_.shared_gate.num_inputs > 0) {
      gates = ensure_size(buffers_.gates, num_rows_);
      multiply<T, T>(dense_inputs_, size_, experts_.shared_gate, gates, 1, num_rows_);
    }
    for_rows(num_rows_, [&](int64_t row) {
      const float* sums = sums_ + row * size_;
      T *to = out + row * size_, *own = outputs_ + row * size_;
      for (int64_t c = 0; c < size_; ++c) own[c] = from_float<T>(sums[c]);
      apply_norm(experts_.out_norm, own, own, size_);
      if (adds) apply_norm(experts_.shared_norm, to, to, size_);
      if (gates) scale_row(to, to_float(from_float<T>(sigmoid(to_float(gates[row])))), size_);
#pragma omp simd
      for (int64_t c = 0; c < size_; ++c) {
        to[c] = adds ? from_float<T>(to_float(own[c]) + to_float(to[c])) : own[c];
      }
    });
  }

  const Experts& experts_;
  const T *dense_inputs_, *routed_;  // inputs of the dense MLP and of the router
  const T* inputs_;                  // inputs of the experts
  const int64_t size_, num_rows_;
  Buffers<T>& buffers_;
  float *sums_, *weights_, *sorted_weights_ = nullptr;
  int64_t *ids_, *tokens_ = nullptr;
  T *gathered_, *outputs_, *inner_, *gated_;
  int64_t starts_[MAX_EXPERTS + 1];
};

}  // namespace

template <typename T>
void mix_experts(const Experts& experts, const T* inputs, const T* stream, int64_t size, T* out, bool adds,
                 int64_t num_rows) {
  if (num_rows > 0) Mixture<T>(experts, inputs, stream, size, num_rows).run(out, adds);
}

template void mix_experts(const Experts&, const float*, const float*, int64_t, float*, bool, int64_t);
template void mix_experts(const Experts&, const bfloat16*, const bfloat16*, int64_t, bfloat16*, bool, int64_t);
