#pragma once
#include <algorithm>
#include <vector>

#include "decoder/decoder.h"

// Consecutive tokens of a request, whose attention for one head is one piece of work.
struct Span {
  int64_t request, first_token, num_tokens, first_position;
};

// Cuts all tokens of a step into spans of at most max_tokens tokens.
inline std::vector<Span> cut_spans(const DecoderStep& step, int64_t max_tokens) {
  std::vector<Span> spans;
  for (int64_t request = 0, token = 0; request < step.num_requests; ++request) {
    const int64_t num = step.query_lens[request], position = step.seq_lens[request] - num;
    for (int64_t start = 0; start < num; start += max_tokens) {
      spans.push_back({request, token + start, std::min(max_tokens, num - start), position + start});
    }
    token += num;
  }
  return spans;
}
