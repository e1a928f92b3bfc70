// Which tokens of a step are computed: all of them, and from some layer on those alone whose logits are wanted.
#pragma once
#include <vector>

#include "spans.h"

class LiveTokens {
 public:
  explicit LiveTokens(const DecoderStep& step)
      : num(step.num_tokens),
        positions(step.positions),
        visible_ends(step.visible_ends),
        adapter_slots(step.adapter_slots),
        step_(step) {}

  // Token i is from here on that of logit row i, which comes earlier, never later, than it was.
  void keep_logit_rows() {
    int64_t request = 0, first = 0;
    for (int64_t i = 0; i < step_.num_logit_rows; ++i) {
      const int64_t row = step_.logit_rows[i];
      while (row >= first + step_.query_lens[request]) first += step_.query_lens[request++];
      const int64_t position = step_.seq_lens[request] - step_.query_lens[request] + row - first;
      kept_spans_.push_back({request, i, 1, position});
      kept_positions_.push_back(positions[row]);
      if (visible_ends) kept_ends_.push_back(visible_ends[row]);
      if (adapter_slots) kept_slots_.push_back(adapter_slots[row]);
    }
    are_kept_ = true;
    num = step_.num_logit_rows;
    positions = kept_positions_.data();
    if (visible_ends) visible_ends = kept_ends_.data();
    if (adapter_slots) adapter_slots = kept_slots_.data();
  }

  // All of them, at most so many in a span.
  std::vector<Span> spans(int64_t most) const { return are_kept_ ? kept_spans_ : cut_spans(step_, most); }

  int64_t num;
  const int64_t *positions, *visible_ends, *adapter_slots;  // [num]; the latter two may be null

 private:
  const DecoderStep& step_;
  bool are_kept_ = false;
  std::vector<Span> kept_spans_;
  std::vector<int64_t> kept_positions_, kept_ends_, kept_slots_;
};
