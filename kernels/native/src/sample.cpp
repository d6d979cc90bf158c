// A token for each sample: the argmax, or a draw by counter-based noise among the tokens that truncation keeps. The
// noise bits equal those of `noise.py`. Knows rows of logits and columns of parameters, no seats.

#include <cmath>
#include <cstring>

#include "logit_edits.h"
#include "survivors.h"
#include "team.h"

namespace quire {

// `SampleRows`, and where samples go; all arrays are [num_samples].
struct Samples {
  const void* logits;  // [.., size]
  int64_t stride, size, num_samples;
  const int32_t* logit_rows;
  const float *temperatures, *floors;
  const int32_t* top_k;
  const double* top_p;
  const int64_t* keys;
  const Edits* edits;  // or null
  int32_t* token_ids;
  bool* valid;
  int32_t half;
};

namespace {

constexpr float SMALLEST = std::numeric_limits<float>::min();  // the least temperature
constexpr float SLACK = 1e-3f;        // far more than the rounding of bounds
constexpr double MOST_NOISE = 22.95;  // gumbel noise is below it

// T: vuint or uint32_t
template <class T>
QUIRE_INLINE T mixed(T x) {
  x = (x ^ (x >> 16)) * 0x21f0aaadu;
  x = (x ^ (x >> 15)) * 0x735a2d97u;
  return x ^ (x >> 15);
}

// Two words of a key, and the noise of tokens under it.
struct Noise {
  uint32_t low, high;

  QUIRE_INLINE vuint bits_of(vuint token_ids, const Noise& key) {
    return mixed(mixed(token_ids * 0x9e3779b1u + key.low) + key.high);
  }

  double gumbel_of(uint32_t token_id) const {
    const int32_t bits = static_cast<int32_t>(mixed(mixed(token_id * 0x9e3779b1u + low) + high));
    const double uniform = (static_cast<double>(bits) + 2147483648.5) * (1.0 / 4294967296.0);
    return -std::log(-std::log(uniform));
  }
};

// At least the gumbel noise of these bits, by at most 0.06 more than -ln(1 - uniform): a float's bits are a logarithm.
QUIRE_INLINE vfloat gumbel_bounds(vuint bits) {
  const float LN_2 = 0.69314718055994531f;
  vint half_of_rest = bits_as<vint>((0x7fffffffu - bits) >> 1);  // (1 - uniform) * 2^31
  vfloat rest = __builtin_convertvector(half_of_rest, vfloat);
  return 158.0f * LN_2 - __builtin_convertvector(bits_as<vint>(rest), vfloat) * (LN_2 / 8388608.0f);
}

// The kept token with the largest sum of scaled logit and noise, the lowest id on a tie. Exact scores cost two
// logarithms; only blocks whose upper bound reaches the best so far compute them.
int64_t draw(const LogitRow& row, const Truncation& rule, float threshold, Noise noise) {
  int64_t best_id = row.best_token();
  double best = noise.gumbel_of(static_cast<uint32_t>(best_id));  // its scaled logit is 0
  const float factor = 1.0f / rule.divisor;
  // The least logit that may win, with room for rounding.
  auto least_logit = [&] {
    const float scaled = std::max(threshold, static_cast<float>(best - MOST_NOISE));
    const float distance = scaled * rule.divisor;
    return rule.max + distance + 1e-5f * distance - 1e-6f * std::fabs(rule.max) - SMALLEST;
  };
  float least = least_logit();
  float bounds[BLOCK];
  for (int64_t b = 0; b < row.num_blocks(); ++b) {
    if (row.block_max(b) < least) continue;
    vfloat most = all(MINUS_INFINITY);
    for (int64_t i = 0; i < BLOCK; i += LANES) {
      vfloat logits = load_floats(row.block(b) + i);
      vuint token_ids = bits_as<vuint>(lane_numbers() + static_cast<int32_t>(b * BLOCK + i));
      vfloat bound = (logits - rule.max) * factor + gumbel_bounds(Noise::bits_of(token_ids, noise));
      bound = logits < least ? all(MINUS_INFINITY) : bound;
      store_floats(bounds + i, bound);
      most = greater(bound, most);
    }
    if (max_of(most) + SLACK < best) continue;
    for (int64_t i = 0; i < BLOCK; ++i) {
      if (!(bounds[i] + SLACK >= best)) continue;
      const int64_t token_id = b * BLOCK + i;
      const float scaled = scaled_of(row.values()[token_id], rule);
      if (token_id >= row.size() || !(scaled >= threshold)) continue;
      const double score = noise.gumbel_of(static_cast<uint32_t>(token_id)) + scaled;
      if (score > best || (score == best && token_id < best_id)) {
        best = score;
        best_id = token_id;
        least = least_logit();
      }
    }
  }
  return best_id;
}

// True if top-p certainly keeps a token that was drawn without top-p: then a draw with top-p gives the same token. Sums
// in float32 are off by less than a tenth of the margin; in doubt the answer is false.
bool surely_survives(const LogitRow& row, const Truncation& rule, int64_t token_id) {
  constexpr double MARGIN = 1e-4;
  const float value = row.values()[token_id], factor = 1.0f / rule.divisor;
  double total = 0.0, before = 0.0;
  for (int64_t b = 0; b < row.num_blocks(); ++b) {
    vfloat sums = {}, sums_before = {};
    for (int64_t i = 0; i < BLOCK; i += LANES) {
      const vfloat logits = load_floats(row.block(b) + i);
      const vfloat masses = exp_below((logits - rule.max) * factor);
      sums += masses;
      sums_before += logits > value ? masses : vfloat{};
    }
    total += sum_of(sums);
    before += sum_of(sums_before);
  }
  return before < rule.top_p * total * (1.0 - MARGIN);
}

// True if only top-p truncates, and it keeps so much that a draw without it probably gives the same token.
bool may_draw_first(const LogitRow& row, const Truncation& rule) {
  const bool has_top_p_alone = rule.top_k >= row.size() && rule.floor == std::numeric_limits<float>::lowest();
  const bool is_accurate = rule.divisor > 1e-30f && rule.divisor < 1e30f;
  return has_top_p_alone && is_accurate && rule.top_p >= 0.5 && rule.top_p < 1.0;
}

struct Scratch {
  LogitRow row;
  Survivors survivors;
};

template <class S>
void sample_row(const Samples& samples, const EditedRows& edits, int64_t i) {
  thread_local Scratch scratch;  // as large as the largest vocabulary
  LogitRow& row = scratch.row;
  row.load(static_cast<const S*>(samples.logits) + samples.logit_rows[i] * samples.stride, samples.size);
  bool is_valid = row.is_finite;
  if (edits.has(i)) {
    edits.apply(i, row);
    is_valid &= row.find_maxima();
  }
  is_valid &= row.max() > MINUS_INFINITY;
  samples.valid[i] = is_valid;
  samples.token_ids[i] = 0;
  if (!is_valid) return;
  if (samples.temperatures[i] == 0.0f) {
    samples.token_ids[i] = static_cast<int32_t>(row.best_token());
    return;
  }
  const Truncation rule = {row.max(), std::max(samples.temperatures[i], SMALLEST), samples.floors[i],
                           samples.top_k[i], samples.top_p[i]};
  const uint64_t key = static_cast<uint64_t>(samples.keys[i]);
  const Noise noise = {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
  if (may_draw_first(row, rule)) {
    const int64_t token_id = draw(row, rule, rule.floor, noise);
    if (surely_survives(row, rule, token_id)) {
      samples.token_ids[i] = static_cast<int32_t>(token_id);
      return;
    }
  }
  const float threshold = scratch.survivors.threshold_of(row, rule);
  samples.token_ids[i] = static_cast<int32_t>(draw(row, rule, threshold, noise));
}

}  // namespace

}  // namespace quire

extern "C" void quire_choose_tokens(const quire::Samples* samples, int num_threads) {
  const quire::EditedRows edits(samples->edits, samples->num_samples);
  quire::share(num_threads, samples->num_samples, [&](int64_t i, int) {
    quire::with_storage(samples->half, [&](auto zero) { quire::sample_row<decltype(zero)>(*samples, edits, i); });
  });
}
