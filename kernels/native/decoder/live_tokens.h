// Tokens of a step that are computed: all of them, and from some layer on only those that need logits.
#pragma once
#include <vector>

#include "decoder/spans.h"

class LiveTokens {
 public:
  explicit LiveTokens(const DecoderStep& step)
      : num(step.num_tokens),
        positions(step.positions),
        visible_ends(step.visible_ends),
        adapter_slots(step.adapter_slots),
        step_(step) {}

  // Keeps only the tokens that need logits: token i is that of logit row i from now on.
  void keep_logit_rows() {
    int64_t request = 0, first = 0;
    for (int64_t i = 0; i < step_.num_logit_rows; ++i) {
      const int64_t row = step_.logit_rows[i];
      while (row >= first + step_.query_lens[request]) first += step_.query_lens[request++];
      const int64_t position = step_.seq_lens[request] - step_.query_lens[request] + row - first;
      logit_spans_.push_back({request, i, 1, position});
      logit_positions_.push_back(positions[row]);
      if (visible_ends) logit_ends_.push_back(visible_ends[row]);
      if (adapter_slots) logit_slots_.push_back(adapter_slots[row]);
    }
    has_only_logit_rows_ = true;
    num = step_.num_logit_rows;
    positions = logit_positions_.data();
    if (visible_ends) visible_ends = logit_ends_.data();
    if (adapter_slots) adapter_slots = logit_slots_.data();
  }

  // Returns spans of all live tokens, with at most max_tokens tokens each.
  std::vector<Span> spans(int64_t max_tokens) const {
    return has_only_logit_rows_ ? logit_spans_ : cut_spans(step_, max_tokens);
  }

  int64_t num;
  const int64_t *positions, *visible_ends, *adapter_slots;  // [num]; the latter two may be null

 private:
  const DecoderStep& step_;
  bool has_only_logit_rows_ = false;
  std::vector<Span> logit_spans_;
  std::vector<int64_t> logit_positions_, logit_ends_, logit_slots_;
};
