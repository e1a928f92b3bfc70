// Chooses a token per row of logits, as the reference does. Rows are independent, and all run on one thread.
//
// Floats are compared by keys: integers with the same order, derived from their bits. Maxima of integers vectorise, NaN
// is the largest, and bfloat16 needs no conversion.
#include <algorithm>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "base/scalar.h"

namespace {

constexpr int64_t BLOCK = 64;   // tokens that share a maximum
constexpr int64_t CHUNK = 256;  // tokens that share a partial sum
constexpr int64_t LANES = 16;
constexpr int64_t WIDTH = 64;   // number of most probable tokens to consider first
constexpr float SMALLEST_EXPONENT = -87.0f;
// If two bit patterns differ by less, few enough weights are between them to sort these.
constexpr uint32_t SORTED_SPAN = 1u << 15;

// Explicit vectors, since a sum in a scalar or an array takes four times as long.
typedef float Floats __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

template <typename T>
struct Ordered;

template <>
struct Ordered<float> {
  using Key = int32_t;
};

template <>
struct Ordered<bfloat16> {
  using Key = int16_t;
};

template <typename T>
inline typename Ordered<T>::Key to_key(T value) {
  using Key = typename Ordered<T>::Key;
  Key bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits ^ ((bits >> (8 * sizeof(Key) - 1)) & std::numeric_limits<Key>::max());
}

template <typename Key>
Key maximum(const Key* keys, int64_t size) {
  Key largest = std::numeric_limits<Key>::min();
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, keys[i]);
  return largest;
}

// One row, with buffers that are reused for the next row.
template <typename T>
class Row {
  using Key = typename Ordered<T>::Key;

 public:
  explicit Row(int64_t vocab_size) : size_(vocab_size), maxima_((vocab_size + BLOCK - 1) / BLOCK), scratch_(maxima_) {}

  void load(const T* logits) {
    logits_ = logits;
    for (size_t block = 0; block < maxima_.size(); ++block) {
      int64_t start = block * BLOCK, end = std::min(start + BLOCK, size_);
      Key largest = std::numeric_limits<Key>::min();
      if (end - start == BLOCK) {
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < BLOCK; ++i) largest = std::max(largest, to_key(logits[start + i]));
      } else {
        for (int64_t i = start; i < end; ++i) largest = std::max(largest, to_key(logits[i]));
      }
      maxima_[block] = largest;
    }
    Key largest = maximum(maxima_.data(), maxima_.size());
    int64_t token = (std::find(maxima_.begin(), maxima_.end(), largest) - maxima_.begin()) * BLOCK;
    while (to_key(logits[token]) != largest) ++token;
    most_probable_ = token;
  }

  int64_t most_probable() const { return most_probable_; }

  int64_t draw(float temperature, int64_t top_k, float top_p, float min_p, double uniform) {
    bool has_limit = top_k > 0 && top_k < size_;
    double total = 0;
    if (!has_limit) total = weigh(temperature, min_p);
    float threshold = 0;  // weights below min_p are 0 already
    if (has_limit || top_p < 1) {
      double nucleus;
      int64_t token = draw_from_top(temperature, has_limit ? top_k : size_, top_p, min_p, uniform, total, &nucleus);
      if (token >= 0) return token;
      threshold = nucleus_threshold(nucleus, total);
    }
    return draw_in_order(threshold, uniform);
  }

 private:
  float weight(T logit, float temperature) const {
    float scaled = (to_float(logit) - to_float(logits_[most_probable_])) / temperature;
    return scaled > SMALLEST_EXPONENT ? fast_exp(scaled) : 0.0f;
  }

  // Fills weights_ with probabilities relative to the largest, 0 below min_p; returns their sum.
  double weigh(float temperature, float min_p) {
    weights_.resize((size_ + CHUNK - 1) / CHUNK * CHUNK);  // the padding stays 0
    double total = 0;
    for (int64_t start = 0; start < size_; start += CHUNK) {
      int64_t end = std::min(start + CHUNK, size_);
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = start; i < end; ++i) {
        float value = weight(logits_[i], temperature);
        value = value < min_p ? 0.0f : value;
        weights_[i] = value;
        sum += value;
      }
      total += sum;
    }
    return total;
  }

  // Draws from the WIDTH most probable tokens. Returns -1 if top_p needs more tokens; sets nucleus to its weight.
  int64_t draw_from_top(float temperature, int64_t limit, float top_p, float min_p, double uniform, double total,
                        double* nucleus) {
    collect_top();
    int64_t num_kept = 0;
    double sums[WIDTH], sum = 0;
    for (; num_kept < std::min<int64_t>(top_.size(), limit); ++num_kept) {
      float value = weight(logits_[token_of(top_[num_kept])], temperature);
      if (value < min_p) break;
      sum += value;
      sums[num_kept] = sum;
    }
    bool continues = num_kept == WIDTH && limit > WIDTH;
    *nucleus = (continues ? total : sum) * top_p;
    if (continues && sum < *nucleus) return -1;
    // The first token is always included, however small top_p is.
    int64_t last = 0;
    while (last + 1 < num_kept && sums[last] < *nucleus) ++last;
    if (num_kept == 0 || !(sums[last] > 0)) return most_probable_;
    double target = uniform * sums[last];
    int64_t place = 0;
    while (place < last && sums[place] <= target) ++place;
    while (place > 0 && sums[place] == sums[place - 1]) --place;  // never one of weight zero
    return token_of(top_[place]);
  }

  // Fills top_ with the WIDTH most probable tokens in descending order; of equal tokens the first.
  void collect_top() {
    Key least = std::numeric_limits<Key>::min();
    if (static_cast<int64_t>(maxima_.size()) > WIDTH) {
      // WIDTH blocks have a token of at least this key, so the WIDTH-th largest token is not smaller.
      scratch_ = maxima_;
      std::nth_element(scratch_.begin(), scratch_.begin() + WIDTH - 1, scratch_.end(), std::greater<Key>());
      least = scratch_[WIDTH - 1];
    }
    top_.clear();
    for (size_t block = 0; block < maxima_.size(); ++block) {
      if (maxima_[block] < least) continue;
      int64_t start = block * BLOCK, end = std::min(start + BLOCK, size_);
      for (int64_t i = start; i < end; ++i) {
        Key key = to_key(logits_[i]);
        if (key >= least) top_.push_back((static_cast<int64_t>(key) << 32) | (INT32_MAX - i));
      }
    }
    auto end = top_.begin() + std::min<int64_t>(WIDTH, top_.size());
    std::partial_sort(top_.begin(), end, top_.end(), std::greater<int64_t>());
    top_.erase(end, top_.end());
  }

  static int64_t token_of(int64_t entry) { return INT32_MAX - (entry & 0xffffffff); }

  // Returns the weight of the last token of the smallest set whose weight reaches nucleus.
  float nucleus_threshold(double nucleus, double total) const {
    // Bit patterns of non-negative floats have the order of their values. Invariant: the weights of at least low reach
    // the nucleus, those of at least high do not. All weights below an equal share of the rest sum to less than the
    // rest.
    float share = (total - nucleus) / size_ * 0.99;
    uint32_t low = to_bits(share), high = 0x3f800001;
    while (high - low > SORTED_SPAN) {
      uint32_t middle = low + (high - low) / 2;
      (sum_from(from_bits(middle)) >= nucleus ? low : high) = middle;
    }
    std::vector<float> between;
    float from = from_bits(low), to = from_bits(high);
    for (size_t start = 0; start < weights_.size(); start += CHUNK) {
      // Most chunks have no such weight, which this counts without a branch per weight.
      int num_between = 0;
      for (size_t i = start; i < start + CHUNK; ++i) num_between += (weights_[i] >= from) & (weights_[i] < to);
      for (size_t i = start; num_between > 0; ++i) {
        if (weights_[i] < from || weights_[i] >= to) continue;
        between.push_back(weights_[i]);
        --num_between;
      }
    }
    std::sort(between.begin(), between.end(), std::greater<float>());
    double sum = sum_from(to);
    for (float value : between) {
      sum += value;
      if (sum >= nucleus) return value;
    }
    return from;
  }

  static uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
  }

  static float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  double sum_from(float threshold) const {
    double total = 0;
    for (size_t start = 0; start < weights_.size(); start += CHUNK) total += chunk_sum(&weights_[start], threshold);
    return total;
  }

  static float chunk_sum(const float* weights, float threshold) {
    const Floats* vectors = reinterpret_cast<const Floats*>(weights);
    Floats sums[4] = {}, none = {};
    for (int64_t i = 0; i < CHUNK / LANES; i += 4) {
      for (int64_t j = 0; j < 4; ++j) sums[j] += vectors[i + j] >= threshold ? vectors[i + j] : none;
    }
    Floats sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float total = 0;
    for (int64_t lane = 0; lane < LANES; ++lane) total += sum[lane];
    return total;
  }

  // Draws by inverse CDF from the weights of at least threshold, in the order of the vocabulary.
  int64_t draw_in_order(float threshold, double uniform) {
    sums_.clear();
    double total = 0;
    for (size_t start = 0; start < weights_.size(); start += CHUNK) {
      sums_.push_back(total += chunk_sum(&weights_[start], threshold));
    }
    if (!(total > 0)) return most_probable_;
    double target = uniform * total;
    // Rounding may make the target equal to the total. Then it is in the last chunk with a positive weight.
    size_t chunk = std::upper_bound(sums_.begin(), sums_.end(), target) - sums_.begin();
    if (chunk == sums_.size()) chunk = std::lower_bound(sums_.begin(), sums_.end(), total) - sums_.begin();
    double sum = chunk ? sums_[chunk - 1] : 0.0;
    int64_t start = chunk * CHUNK, end = std::min(start + CHUNK, size_), last = start;
    for (int64_t i = start; i < end; ++i) {
      if (!(weights_[i] > 0) || weights_[i] < threshold) continue;
      last = i;
      sum += weights_[i];
      if (sum > target) break;
    }
    return last;
  }

  int64_t size_;
  const T* logits_ = nullptr;
  int64_t most_probable_ = 0;
  std::vector<Key> maxima_, scratch_;
  std::vector<int64_t> top_;
  std::vector<float> weights_;
  std::vector<double> sums_;
};

template <typename T>
void sample(const T* logits, int64_t stride, const float* temperature, const int64_t* top_k, const float* top_p,
            const float* min_p, const double* uniforms, int64_t* tokens, int64_t num_rows, int64_t vocab_size) {
  Row<T> row(vocab_size);
  for (int64_t i = 0; i < num_rows; ++i) {
    row.load(logits + i * stride);
    bool is_greedy = !temperature || temperature[i] <= 0;
    tokens[i] = is_greedy ? row.most_probable() : row.draw(temperature[i], top_k[i], top_p[i], min_p[i], uniforms[i]);
  }
}

}  // namespace

// temperature may be null: then every row takes its most probable token, and the other parameters are not read.
#define PENSTOCK_SAMPLING(T, suffix)                                                                              \
  extern "C" void sample_##suffix(const T* logits, int64_t stride, const float* temperature, const int64_t* top_k, \
                                  const float* top_p, const float* min_p, const double* uniforms, int64_t* tokens, \
                                  int64_t num_rows, int64_t vocab_size) {                                         \
    sample<T>(logits, stride, temperature, top_k, top_p, min_p, uniforms, tokens, num_rows, vocab_size);          \
  }

PENSTOCK_SAMPLING(float, float32)
PENSTOCK_SAMPLING(bfloat16, bfloat16)
