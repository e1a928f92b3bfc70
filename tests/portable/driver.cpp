// Calls the compiled kernels without Python, so that a library for another processor can be run where only an emulator
// is: products of all kinds, attention, a decoder's step, sampling. Prints a line for each: "same" or "near", the dtype,
// a name and the numbers; check.py compares the lines of two libraries. What a row's bits are not to depend on is checked
// here.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "weights/blocks.h"
#include "decoder/decoder.h"

template <typename T>
constexpr const char* DTYPE = sizeof(T) == 4 ? "float32" : "bfloat16";

#define PENSTOCK_DECLARED(T, suffix)                                                                              \
  void pack_linear_##suffix(const T*, T*, int64_t, int64_t);                                                      \
  void quantize_linear_##suffix(const T*, int8_t*, float*, int32_t*, int64_t, int64_t);                           \
  void quantize_linear_to_nibbles_##suffix(const T*, const float*, uint8_t*, float*, int32_t*, int64_t, int64_t); \
  void linear_##suffix(const T*, int64_t, const Linear*, T*, int64_t);                                            \
  int decode_##suffix(const T*, int64_t, const T*, const T*, const int64_t*, int64_t, const int64_t*, int64_t,    \
                      int64_t, int64_t, int64_t, int64_t, float, T*);                                             \
  void run_decoder_##suffix(const Decoder*, const DecoderStep*, int64_t);                                         \
  void mix_##suffix(const Mixer*, const MixerStep*, const T*, int64_t, T*, int64_t);                              \
  void sample_##suffix(const T*, int64_t, const float*, const int64_t*, const float*, const float*, const double*, \
                       int64_t*, int64_t, int64_t);

extern "C" {
PENSTOCK_DECLARED(float, float32)
PENSTOCK_DECLARED(bfloat16, bfloat16)
const char* instructions();
void set_num_threads(int64_t);
}

template <typename T>
struct Library;

#define PENSTOCK_CHOSEN(T, suffix)                                                       \
  template <>                                                                            \
  struct Library<T> {                                                                    \
    static constexpr auto pack = pack_linear_##suffix;                                   \
    static constexpr auto to_bytes = quantize_linear_##suffix;                           \
    static constexpr auto to_nibbles = quantize_linear_to_nibbles_##suffix;              \
    static constexpr auto linear = linear_##suffix;                                      \
    static constexpr auto decode = decode_##suffix;                                      \
    static constexpr auto run_decoder = run_decoder_##suffix;                            \
    static constexpr auto mix = mix_##suffix;                                            \
    static constexpr auto sample = sample_##suffix;                                      \
  };

PENSTOCK_CHOSEN(float, float32)
PENSTOCK_CHOSEN(bfloat16, bfloat16)

// Between -1 and 1, the same on every processor.
template <typename T>
std::vector<T> random_numbers(size_t num, uint32_t seed) {
  std::vector<T> numbers(num);
  for (T& number : numbers) {
    seed = seed * 1664525u + 1013904223u;
    number = from_float<T>(static_cast<float>(static_cast<int32_t>(seed) >> 8) / (1 << 23));
  }
  return numbers;
}

template <typename T, typename Number>
void print(const char* how, const std::string& name, const std::vector<Number>& numbers) {
  std::printf("%s %s %s", how, DTYPE<T>, name.c_str());
  for (Number number : numbers) {
    if constexpr (std::is_integral_v<Number>) {
      std::printf(" %lld", static_cast<long long>(number));
    } else {
      std::printf(" %.9g", to_float(number));
    }
  }
  std::printf("\n");
}

template <typename T>
void expect_equal(const std::vector<T>& some, const std::vector<T>& others, const std::string& what) {
  if (std::memcmp(some.data(), others.data(), some.size() * sizeof(T)) == 0) return;
  std::printf("differs %s %s\n", DTYPE<T>, what.c_str());
  std::exit(1);
}

enum class Kind { PLAIN, BYTES, NIBBLES };
const char* const KIND_NAMES[] = {"plain", "bytes", "nibbles"};

// A weight with all that its Linear points to.
template <typename T>
struct Weight {
  std::vector<char> packed;
  std::vector<float> scales, bias;
  std::vector<int32_t> offsets;
  Linear linear;

  Weight(int64_t num_outputs, int64_t num_inputs, Kind kind, uint32_t seed) {
    std::vector<T> weight = random_numbers<T>(num_outputs * num_inputs, seed);
    const int64_t padded = (num_outputs + 63) / 64 * 64;
    packed.resize(padded * (num_inputs + 64) * sizeof(T));
    scales.resize(padded), offsets.resize(padded);
    bias = random_numbers<float>(padded, seed + 1);
    if (kind == Kind::PLAIN) Library<T>::pack(weight.data(), at<T>(), num_outputs, num_inputs);
    if (kind == Kind::BYTES) {
      Library<T>::to_bytes(weight.data(), at<int8_t>(), scales.data(), offsets.data(), num_outputs, num_inputs);
    }
    if (kind == Kind::NIBBLES) {
      Library<T>::to_nibbles(weight.data(), nullptr, at<uint8_t>(), scales.data(), offsets.data(), num_outputs,
                             num_inputs);
    }
    const bool is_plain = kind == Kind::PLAIN;
    linear = {packed.data(), bias.data(), is_plain ? nullptr : scales.data(), is_plain ? nullptr : offsets.data(),
              num_inputs, num_outputs, kind == Kind::NIBBLES};
  }

  Weight(const Weight&) = delete;

 private:
  template <typename Element>
  Element* at() {
    return reinterpret_cast<Element*>(packed.data());
  }
};

template <typename T>
std::vector<T> multiply_rows(const T* rows, const Linear& linear, int64_t num_rows) {
  std::vector<T> out(num_rows * linear.num_outputs);
  Library<T>::linear(rows, linear.num_inputs, &linear, out.data(), num_rows);
  return out;
}

// Returns products of all rows, which are the same on several threads, and for each row alone.
template <typename T>
std::vector<T> expect_rows_independent(const std::vector<T>& rows, const Linear& linear, int64_t num_rows,
                                       const std::string& name) {
  const std::vector<T> together = multiply_rows(rows.data(), linear, num_rows);
  set_num_threads(3);
  expect_equal(together, multiply_rows(rows.data(), linear, num_rows), name + " on three threads");
  set_num_threads(1);
  for (int64_t row = 0; row < num_rows; ++row) {
    const std::vector<T> alone = multiply_rows(rows.data() + row * linear.num_inputs, linear, 1);
    const auto begin = together.begin() + row * linear.num_outputs;
    expect_equal(alone, std::vector<T>(begin, begin + linear.num_outputs), name + ", a row alone");
  }
  return together;
}

template <typename T>
void try_products() {
  constexpr int64_t NUM_ROWS = 23, NUM_OUTPUTS = 100;
  for (const Kind kind : {Kind::PLAIN, Kind::BYTES, Kind::NIBBLES}) {
    for (const int64_t num_inputs : {20, 192}) {
      const std::string name = std::string(KIND_NAMES[static_cast<int>(kind)]) + "-" + std::to_string(num_inputs);
      const Weight<T> weight(NUM_OUTPUTS, num_inputs, kind, 7);
      const std::vector<T> rows = random_numbers<T>(NUM_ROWS * num_inputs, 3);
      print<T>("near", "product-" + name, expect_rows_independent(rows, weight.linear, NUM_ROWS, name));
      if (kind == Kind::BYTES) print<T>("same", "offsets-" + name, weight.offsets);
    }
  }
}

// Weights in all forms of blocks. Any bits are numbers, so only scales and minimums are drawn as floats of normal size.
template <typename T>
void try_blocks() {
  constexpr int64_t NUM_ROWS = 23, NUM_OUTPUTS = 100, NUM_INPUTS = 192, PANELS = 2;
  const std::pair<int64_t, int64_t> forms[] = {{4, 16}, {6, 16}, {8, 16}, {4, 32}, {5, 32}, {8, 32}};
  const std::vector<T> rows = random_numbers<T>(NUM_ROWS * NUM_INPUTS, 3);
  for (const auto& [bits, block_inputs] : forms) {
    for (const bool has_minimums : {false, true}) {
      const std::string name = "blocks-" + std::to_string(bits) + "-bits-" + std::to_string(block_inputs) +
                               (has_minimums ? "-minimums" : "");
      Linear linear{nullptr, nullptr, nullptr, nullptr, NUM_INPUTS, NUM_OUTPUTS, 0, block_inputs, bits, has_minimums};
      std::vector<uint16_t> packed(PANELS * NUM_INPUTS / block_inputs * block_bytes(linear) / sizeof(uint16_t));
      uint32_t seed = 7;
      for (uint16_t& word : packed) word = (seed = seed * 1664525u + 1013904223u) >> 16;
      // The exponents of halves between 2^-7 and 2^-4, of either sign.
      for (size_t at = 0; at < packed.size(); at += block_bytes(linear) / sizeof(uint16_t)) {
        for (int64_t i = 0; i < PANEL * (has_minimums ? 2 : 1); ++i) packed[at + i] = (packed[at + i] & 0x8bff) | 0x2000;
      }
      linear.packed = packed.data();
      print<T>("near", "product-" + name, expect_rows_independent(rows, linear, NUM_ROWS, name));
    }
  }
}

template <typename T>
void try_attention() {
  constexpr int64_t NUM_ROWS = 3, HEADS = 6, KV_HEADS = 2, DIM = 32, BLOCK = 4, BLOCKS_EACH = 8;
  std::vector<int64_t> tables, lens = {5, 31, 17};
  for (int64_t i = 0; i < NUM_ROWS * BLOCKS_EACH; ++i) tables.push_back(i * 7 % (NUM_ROWS * BLOCKS_EACH));
  const size_t cache_size = tables.size() * BLOCK * KV_HEADS * DIM;
  const std::vector<T> queries = random_numbers<T>(NUM_ROWS * HEADS * DIM, 1), keys = random_numbers<T>(cache_size, 2),
                       values = random_numbers<T>(cache_size, 3);
  for (const int64_t window : {0, 9}) {
    std::vector<T> out(queries.size());
    std::vector<int64_t> ranges;
    for (const int64_t len : lens) ranges.push_back(window ? std::max<int64_t>(0, len - window) : 0), ranges.push_back(len);
    Library<T>::decode(queries.data(), HEADS * DIM, keys.data(), values.data(), tables.data(), BLOCKS_EACH, ranges.data(),
                       NUM_ROWS, HEADS, KV_HEADS, DIM, BLOCK, 0.3f, out.data());
    print<T>("near", "attention-window-" + std::to_string(window), out);
  }
}

// Two layers on a prompt, whole and in two parts: one as Llama's, one with whatever else a layer may do.
template <typename T>
struct SmallDecoder {
  static constexpr int64_t HIDDEN = 64, HEADS = 6, KV_HEADS = 2, DIM = 32, MLP = 96, VOCAB = 70, BLOCK = 4, TOKENS = 21,
                           BLOCKS = 6, LAYERS = 2, EXPERTS = 3;
  Weight<T> qkv, output, gate_up, down, lm_head, of_pairs, behind_pairs;
  Weight<float> router;
  Linear of_experts[EXPERTS], behind_experts[EXPERTS];
  Experts experts{};
  std::vector<T> ones, embeddings;
  std::vector<float> wide, sinks, cos, sin;
  std::vector<char> caches[2 * LAYERS];
  DecoderLayer layers[LAYERS];

  const bool caches_bytes;

  explicit SmallDecoder(Kind kind, bool caches_bytes)
      : qkv((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, kind, 1),
        output(HIDDEN, HEADS * DIM, kind, 2),
        gate_up(2 * MLP, HIDDEN, kind, 3),
        down(HIDDEN, MLP, kind, 4),
        lm_head(VOCAB, HIDDEN, kind, 5),
        of_pairs(2 * MLP, HIDDEN, kind, 10),
        behind_pairs(HIDDEN, MLP, kind, 11),
        router(EXPERTS, HIDDEN, Kind::PLAIN, 12),
        ones(HIDDEN, from_float<T>(1)),
        embeddings(random_numbers<T>(VOCAB * HIDDEN, 6)),
        wide(HIDDEN, 1.1f),
        sinks(random_numbers<float>(HEADS, 9)),
        cos(random_numbers<float>(TOKENS * DIM, 7)),
        sin(random_numbers<float>(TOKENS * DIM, 8)),
        caches_bytes(caches_bytes) {
    for (auto& cache : caches) cache.resize(BLOCKS * KV_HEADS * 16 * DIM * sizeof(T));
    const Norm narrow{ones.data(), nullptr, NormKind::RMS, 1e-5f}, none{};
    for (int64_t i = 0; i < LAYERS; ++i) {
      layers[i] = {narrow, none, narrow, none, none, none, none, qkv.linear, output.linear, gate_up.linear, down.linear};
      layers[i].keys = caches[2 * i].data(), layers[i].values = caches[2 * i + 1].data();
      layers[i].scale = 0.02f, layers[i].residual_scale = 1, layers[i].window = i * 6, layers[i].is_gated = 1;
      layers[i].num_heads = HEADS, layers[i].num_kv_heads = KV_HEADS, layers[i].head_dim = DIM, layers[i].stores = 1;
    }
    DecoderLayer& other = layers[1];
    other.input_norm = {wide.data(), wide.data(), NormKind::CENTRED, 1e-5f};
    other.attention_norm = other.mlp_out_norm = {wide.data(), nullptr, NormKind::WIDE_RMS, 1e-5f};
    other.sinks = sinks.data(), other.softcap = 2, other.residual_scale = 0.5f, other.is_interleaved = 1;
    other.activation = Activation::GELU;
    // Each token goes to all, since a router's sums are not the same everywhere.
    for (int64_t i = 0; i < EXPERTS; ++i) {
      of_experts[i] = i ? of_pairs.linear : gate_up.linear, behind_experts[i] = i ? behind_pairs.linear : down.linear;
    }
    experts.router = router.linear, experts.gate_up = of_experts, experts.down = behind_experts;
    experts.num_experts = experts.num_chosen = EXPERTS, experts.scale = 1;
    experts.rounds_logits = experts.rounds_weights = 1, experts.alpha = 1.7f, experts.limit = 2;
    other.experts = &experts;
  }

  // The logits of the last token of start .. end.
  std::vector<float> run(int64_t start, int64_t end) {
    std::vector<int64_t> ids, positions, table;
    for (int64_t i = start; i < end; ++i) ids.push_back(i * 13 % VOCAB), positions.push_back(i);
    for (int64_t i = 0; i < BLOCKS; ++i) table.push_back(i);
    const int64_t num = end - start, last = num - 1;
    std::vector<float> logits(VOCAB);
    const Decoder decoder{layers, LAYERS, HIDDEN, MLP, BLOCK, caches_bytes, 0, 0, 2, 1, 0.5f, 3, embeddings.data(),
                          {ones.data(), nullptr, NormKind::RMS, 1e-5f}, lm_head.linear, nullptr};
    const Angles angles{cos.data(), sin.data(), DIM};
    const DecoderStep step{num, 1, 1, ids.data(), positions.data(), positions.data(), nullptr, &angles,
                           table.data(), BLOCKS, &num, &end, &last, logits.data()};
    Library<T>::run_decoder(&decoder, &step, 1);
    return logits;
  }
};

template <typename T>
void try_decoder() {
  const std::pair<Kind, bool> cases[] = {
      {Kind::PLAIN, false}, {Kind::BYTES, false}, {Kind::NIBBLES, false}, {Kind::PLAIN, true}};
  for (const auto& [kind, caches_bytes] : cases) {
    SmallDecoder<T> decoder(kind, caches_bytes);
    const std::string name =
        std::string("decoder-") + KIND_NAMES[static_cast<int>(kind)] + (caches_bytes ? "-cache-bytes" : "");
    const std::vector<float> whole = decoder.run(0, decoder.TOKENS);
    print<T>("near", name, whole);
    set_num_threads(2);
    decoder.run(0, 9);
    decoder.run(9, decoder.TOKENS - 1);
    expect_equal(decoder.run(decoder.TOKENS - 1, decoder.TOKENS), whole, name + ", in parts");
    set_num_threads(1);
  }
}

// One request in three steps, from slot to slot.
template <typename T>
void try_mixers() {
  constexpr int64_t TAPS = 4, HEADS = 4, GROUPS = 2, DIM = 48, KEYS = 24, TOKENS = 9;
  for (const MixerKind kind : {MixerKind::CONVOLUTION, MixerKind::DELTA_RULE, MixerKind::SCAN}) {
    const int64_t values = HEADS * DIM, channels = kind == MixerKind::CONVOLUTION ? values : values + 2 * GROUPS * KEYS;
    const int64_t width = 3 * channels + 2 * HEADS;
    const std::vector<T> rows = random_numbers<T>(TOKENS * width, 1);
    const std::vector<float> taps = random_numbers<float>(TAPS * channels, 2), heads = random_numbers<float>(HEADS, 3),
                             norm = random_numbers<float>(values, 4);
    std::vector<T> recent(2 * (TAPS - 1) * channels), out(TOKENS * values);
    std::vector<float> states(2 * HEADS * KEYS * DIM);
    const Mixer mixer{kind, TAPS, channels, HEADS, GROUPS, DIM, KEYS, 0, channels, 2 * channels, 2 * channels + HEADS,
                      DIM, values, kind == MixerKind::SCAN, 1e-5f, 0, taps.data(), nullptr, heads.data(), heads.data(),
                      heads.data(), norm.data(), nullptr, recent.data(), states.data()};
    int64_t from = -1, to = 0, token = 0;
    for (const int64_t num : {3, 5, 1}) {
      const MixerStep step{num, 1, &num, &from, &to};
      Library<T>::mix(&mixer, &step, rows.data() + token * width, width, out.data() + token * values, values);
      token += num, from = to, to = 1 - to;
    }
    print<T>("near", "mixer-" + std::to_string(static_cast<int64_t>(kind)), out);
  }
}

template <typename T>
void try_sampling() {
  constexpr int64_t NUM_ROWS = 5, VOCAB = 1000;
  const std::vector<T> logits = random_numbers<T>(NUM_ROWS * VOCAB, 9);
  const std::vector<float> temperature = {0, 1, 0.3f, 2, 0.7f}, top_p = {1, 1, 0.9f, 0.5f, 1}, min_p = {0, 0, 0, 0, 0.3f};
  const std::vector<int64_t> top_k = {0, 0, 40, 0, 0};
  const std::vector<double> uniforms = {0.1, 0.37, 0.62, 0.81, 0.5};
  std::vector<int64_t> tokens(NUM_ROWS);
  Library<T>::sample(logits.data(), VOCAB, temperature.data(), top_k.data(), top_p.data(), min_p.data(), uniforms.data(),
                     tokens.data(), NUM_ROWS, VOCAB);
  print<T>("same", "sampled", tokens);
}

template <typename T>
void try_all() {
  try_products<T>();
  try_blocks<T>();
  try_attention<T>();
  try_decoder<T>();
  try_mixers<T>();
  try_sampling<T>();
}

int main() {
  std::printf("instructions %s\n", instructions());
  try_all<float>();
  try_all<bfloat16>();
}
