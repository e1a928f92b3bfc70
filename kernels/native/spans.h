#pragma once
#include <algorithm>
#include <vector>

#include "decoder.h"

// Tokens of a request whose attention is one piece of work, for one head.
struct Span {
  int64_t request, first_token, num_tokens, first_position;
};

// All tokens of a step, at most so many in a span.
inline std::vector<Span> cut_spans(const DecoderStep& step, int64_t most) {
  std::vector<Span> spans;
  for (int64_t request = 0, token = 0; request < step.num_requests; ++request) {
    const int64_t num = step.query_lens[request], position = step.seq_lens[request] - num;
    for (int64_t start = 0; start < num; start += most) {
      spans.push_back({request, token + start, std::min(most, num - start), position + start});
    }
    token += num;
  }
  return spans;
}
