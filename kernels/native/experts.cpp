// Tokens go to their experts expert by expert, so that each expert's weights are read once. See experts.h.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"

namespace {

constexpr int64_t ROWS_PER_PIECE = 8;
constexpr float SMALLEST_SUM = 1e-20f;  // of sigmoids, which may all be next to nothing

// Kept from step to step, by the calling thread; all pieces of work are given a part of it.
template <typename T>
struct Buffers {
  std::vector<T> gathered, inner, gated, made, gates, normed;
  std::vector<float> widened, logits, sums, counts, sorted_counts;
  std::vector<int64_t> ids, tokens;

  static Buffers& of_thread() {
    static thread_local Buffers kept;
    return kept;
  }
};

template <typename Element>
Element* room(std::vector<Element>& buffer, int64_t num) {
  if (static_cast<int64_t>(buffer.size()) < num) buffer.resize(num);
  return buffer.data();
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Pairs of neighbours: a gate, and what it opens for.
template <typename T>
void clamped_gate_row(const T* pairs, T* out, int64_t size, float alpha, float limit) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    const float gate = std::min(to_float(pairs[2 * i]), limit);
    const float up = std::max(-limit, std::min(to_float(pairs[2 * i + 1]), limit));
    out[i] = from_float<T>((up + 1.0f) * gate / (1.0f + fast_exp(-alpha * gate)));
  }
}

// One call: the rows of all tokens. What becomes of a row is its own: sums over its experts go in the experts' order.
template <typename T>
class Mixture {
 public:
  Mixture(const Experts& experts, const T* inputs, const T* stream, int64_t size, int64_t num_rows)
      : e_(experts),
        dense_inputs_(inputs),
        routed_(experts.input_norm.kind == NormKind::NONE ? inputs : stream),
        inputs_(routed_),
        size_(size),
        num_rows_(num_rows),
        buffers_(Buffers<T>::of_thread()) {
    sums_ = room(buffers_.sums, num_rows * size);
    ids_ = room(buffers_.ids, num_rows * e_.num_chosen);
    counts_ = room(buffers_.counts, num_rows * e_.num_chosen);
    const int64_t width = e_.gate_up[0].num_outputs, inner = e_.down[0].num_inputs;
    gathered_ = room(buffers_.gathered, num_rows * size);
    made_ = room(buffers_.made, num_rows * size);
    inner_ = room(buffers_.inner, num_rows * width);
    gated_ = room(buffers_.gated, num_rows * inner);
  }

  void all(T* out, bool adds) {
    route();
    if (e_.input_norm.kind != NormKind::NONE) normalise_inputs();
    sort();
    for (int64_t expert = 0; expert < e_.num_experts; ++expert) {
      if (firsts_[expert] < firsts_[expert + 1]) ask(expert);
    }
    put(out, adds);
  }

 private:
  template <typename Body>
  static void for_rows(int64_t num_rows, const Body& body) {
    for_ranges(num_rows, ROWS_PER_PIECE, [&](int64_t start, int64_t end) {
      for (int64_t row = start; row < end; ++row) body(row);
    });
  }

  void route() {
    float* widened = room(buffers_.widened, num_rows_ * size_);
    float* logits = room(buffers_.logits, num_rows_ * e_.num_experts);
    T* normed = room(buffers_.normed, num_rows_ * size_);
    for_rows(num_rows_, [&](int64_t row) {
      T* own = normed + row * size_;
      apply_norm(e_.router_norm, routed_ + row * size_, own, size_);
      for (int64_t i = 0; i < size_; ++i) widened[row * size_ + i] = scaled(own[i], i);
      std::fill_n(sums_ + row * size_, size_, 0.0f);
    });
    multiply<float, float>(widened, size_, e_.router, logits, e_.num_experts, num_rows_);
    for_rows(num_rows_, [&](int64_t row) {
      choose(logits + row * e_.num_experts, ids_ + row * e_.num_chosen, counts_ + row * e_.num_chosen);
    });
  }

  float scaled(T value, int64_t i) const {
    if (!e_.input_scale) return to_float(value);
    const T once = from_float<T>(to_float(value) * e_.input_scale[i]);
    return to_float(from_float<T>(to_float(once) * e_.input_factor));
  }

  // Of the experts, once the router has had its own.
  void normalise_inputs() {
    T* normed = room(buffers_.normed, num_rows_ * size_);
    for_rows(num_rows_, [&](int64_t row) {
      apply_norm(e_.input_norm, routed_ + row * size_, normed + row * size_, size_);
    });
    inputs_ = normed;
  }

  // From logits, which become scores, to experts and what each counts.
  void choose(float* logits, int64_t* ids, float* counts) const {
    const int64_t num = e_.num_experts;
    if (e_.rounds_logits) {
      for (int64_t x = 0; x < num; ++x) logits[x] = to_float(from_float<T>(logits[x]));
    }
    score(logits, num);
    bool is_taken[MAX_EXPERTS] = {};
    float sum = e_.has_sigmoids ? SMALLEST_SUM : 0.0f;
    for (int64_t j = 0; j < e_.num_chosen; ++j) {
      ids[j] = best(logits, is_taken);
      is_taken[ids[j]] = true;
      counts[j] = logits[ids[j]];
      sum += counts[j];
    }
    for (int64_t j = 0; j < e_.num_chosen; ++j) {
      const float own = e_.expert_scale ? e_.expert_scale[ids[j]] : 1.0f;
      const float count = (e_.renormalizes ? counts[j] / sum : counts[j]) * e_.scale * own;
      counts[j] = e_.rounds_weights ? to_float(from_float<T>(count)) : count;
    }
  }

  void score(float* logits, int64_t num) const {
    if (e_.has_sigmoids) {
      for (int64_t x = 0; x < num; ++x) logits[x] = sigmoid(logits[x]);
      return;
    }
    const float largest = *std::max_element(logits, logits + num);
    float sum = 0;
    for (int64_t x = 0; x < num; ++x) sum += logits[x] = std::exp(logits[x] - largest);
    for (int64_t x = 0; x < num; ++x) logits[x] /= sum;
  }

  // Of equal ones the first; of those that are no numbers any, so that there always is one.
  int64_t best(const float* scores, const bool* is_taken) const {
    int64_t found = -1;
    float most = 0;
    for (int64_t x = 0; x < e_.num_experts; ++x) {
      if (is_taken[x]) continue;
      const float wanted = scores[x] + (e_.choice_bias ? e_.choice_bias[x] : 0.0f);
      if (found < 0 || wanted > most) found = x, most = wanted;
    }
    return found;
  }

  // The tokens of each expert side by side, in their order.
  void sort() {
    const int64_t num = num_rows_ * e_.num_chosen;
    tokens_ = room(buffers_.tokens, num);
    sorted_counts_ = room(buffers_.sorted_counts, num);
    std::fill_n(firsts_, e_.num_experts + 1, 0);
    for (int64_t i = 0; i < num; ++i) ++firsts_[ids_[i] + 1];
    for (int64_t x = 0; x < e_.num_experts; ++x) firsts_[x + 1] += firsts_[x];
    int64_t next[MAX_EXPERTS];
    std::copy(firsts_, firsts_ + e_.num_experts, next);
    for (int64_t i = 0; i < num; ++i) {
      const int64_t place = next[ids_[i]]++;
      tokens_[place] = i / e_.num_chosen;
      sorted_counts_[place] = counts_[i];
    }
  }

  void ask(int64_t expert) {
    const int64_t first = firsts_[expert], num = firsts_[expert + 1] - first;
    const int64_t* tokens = tokens_ + first;
    const Linear &gate_up = e_.gate_up[expert], &down = e_.down[expert];
    const int64_t width = gate_up.num_outputs, inner = down.num_inputs;
    for_rows(num, [&](int64_t i) { std::memcpy(gathered_ + i * size_, inputs_ + tokens[i] * size_, size_ * sizeof(T)); });
    multiply<T, T>(gathered_, size_, gate_up, inner_, width, num);
    for_rows(num, [&](int64_t i) {
      const T* from = inner_ + i * width;
      T* to = gated_ + i * inner;
      if (e_.limit > 0) {
        clamped_gate_row(from, to, inner, e_.alpha, e_.limit);
      } else {
        activate_row(e_.activation, e_.is_gated, from, to, inner);
      }
    });
    multiply<T, T>(gated_, inner, down, made_, size_, num);
    for_rows(num, [&](int64_t i) {
      const T* made = made_ + i * size_;
      float* sums = sums_ + tokens[i] * size_;
      const float count = sorted_counts_[first + i];
#pragma omp simd
      for (int64_t c = 0; c < size_; ++c) sums[c] += count * to_float(made[c]);
    });
  }

  void put(T* out, bool adds) {
    T* gates = nullptr;
    if (adds && e_.shared_gate.num_inputs > 0) {
      gates = room(buffers_.gates, num_rows_);
      multiply<T, T>(dense_inputs_, size_, e_.shared_gate, gates, 1, num_rows_);
    }
    for_rows(num_rows_, [&](int64_t row) {
      const float* sums = sums_ + row * size_;
      T *to = out + row * size_, *own = made_ + row * size_;
      for (int64_t c = 0; c < size_; ++c) own[c] = from_float<T>(sums[c]);
      apply_norm(e_.out_norm, own, own, size_);
      if (adds) apply_norm(e_.shared_norm, to, to, size_);
      if (gates) scale_row(to, to_float(from_float<T>(sigmoid(to_float(gates[row])))), size_);
#pragma omp simd
      for (int64_t c = 0; c < size_; ++c) {
        to[c] = adds ? from_float<T>(to_float(own[c]) + to_float(to[c])) : own[c];
      }
    });
  }

  const Experts& e_;
  const T *dense_inputs_, *routed_;  // what is given to what is beside the experts, and to the router
  const T* inputs_;                  // of the experts
  const int64_t size_, num_rows_;
  Buffers<T>& buffers_;
  float *sums_, *counts_, *sorted_counts_ = nullptr;
  int64_t *ids_, *tokens_ = nullptr;
  T *gathered_, *made_, *inner_, *gated_;
  int64_t firsts_[MAX_EXPERTS + 1];
};

}  // namespace

template <typename T>
void mix_experts(const Experts& experts, const T* inputs, const T* stream, int64_t size, T* out, bool adds,
                 int64_t num_rows) {
  if (num_rows > 0) Mixture<T>(experts, inputs, stream, size, num_rows).all(out, adds);
}

template void mix_experts(const Experts&, const float*, const float*, int64_t, float*, bool, int64_t);
template void mix_experts(const Experts&, const bfloat16*, const bfloat16*, int64_t, bfloat16*, bool, int64_t);
