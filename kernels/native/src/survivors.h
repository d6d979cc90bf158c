// Threshold of min-p, top-k and top-p on scaled logits, exactly that of `sampling.truncation_thresholds`.
// Probabilities are integers, so sums do not depend on the order of addition, and nothing is sorted: the search goes
// over buckets of equal width, then over the bits of float32 numbers, digit by digit.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "logit_row.h"

namespace quire {

typedef float vfew __attribute__((vector_size(LANES * 2)));  // half a vector's number of floats
typedef double vdouble __attribute__((vector_size(LANES * 4)));
typedef int64_t vlong __attribute__((vector_size(LANES * 4)));

// Sampling parameters of one row.
struct Truncation {
  float max, divisor;  // scaled = (logit - max) / divisor
  float floor;         // the least scaled logit that survives min-p
  int64_t top_k;       // the vocabulary's size is off
  double top_p;        // 1 is off
};

QUIRE_INLINE float scaled_of(float logit, const Truncation& rule) { return (logit - rule.max) / rule.divisor; }

// Bits of how far a scaled logit is below 0: integers in the order of falling values, the same for -0 and 0.
QUIRE_INLINE uint32_t depth_of(float scaled) { return bits_as<uint32_t>(scaled) & 0x7fffffffu; }

// e^x * 2^40, to the nearest integer, for x from -30 to 0; e^x is within a unit in the last place of a double.
QUIRE_INLINE vlong masses_of(vdouble x) {
  const double MAGIC = 6755399441055744.0;    // 1.5 * 2^52: adding it rounds to an integer, which is in the low bits
  const double ROUNDER = 4503599627370496.0;  // 2^52
  vdouble shifted = x * 1.4426950408889634 + MAGIC;
  vdouble n = shifted - MAGIC;
  vdouble r = x - n * 6.93147180369123816490e-01;
  r = r - n * 1.90821492927058770002e-10;
  // The series to r^13, in pairs, since each of fourteen steps one after the other would wait for the one before.
  vdouble r2 = r * r, r4 = r2 * r2;
  vdouble low = (1.0 + r) + r2 * (0.5 + r * (1.0 / 6.0));
  vdouble middle = (1.0 / 24.0 + r * (1.0 / 120.0)) + r2 * (1.0 / 720.0 + r * (1.0 / 5040.0));
  vdouble high = (1.0 / 40320.0 + r * (1.0 / 362880.0)) + r2 * (1.0 / 3628800.0 + r * (1.0 / 39916800.0));
  vdouble highest = 1.0 / 479001600.0 + r * (1.0 / 6227020800.0);
  vdouble p = low + r4 * (middle + r4 * (high + r4 * highest));
  vdouble y = bits_as<vdouble>(bits_as<vlong>(p) + (bits_as<vlong>(shifted) << 52));
  return bits_as<vlong>(y * 1099511627776.0 + ROUNDER) - bits_as<int64_t>(ROUNDER);
}

// GCC 12 emits many instructions for a conversion that needs one.
QUIRE_INLINE vdouble widened(vfew x) {
#if defined(__AVX512F__) && QUIRE_LANES == 16
  return (vdouble)_mm512_maskz_cvtps_pd(0xff, (__m256)x);
#elif defined(__AVX2__) && QUIRE_LANES == 8
  return (vdouble)_mm256_cvtps_pd((__m128)x);
#else
  return __builtin_convertvector(x, vdouble);
#endif
}

// masses: [LANES]
QUIRE_INLINE void store_masses(int64_t* masses, vuint depths) {
  vfew scaled[2];
  store(scaled, depths | 0x80000000u);
  store(masses, masses_of(widened(scaled[0])));
  store(masses + LANES / 2, masses_of(widened(scaled[1])));
}

class Survivors {
 public:
  // The lowest scaled logit that is kept; logits must be finite or barred, and their maximum finite.
  float threshold_of(LogitRow& row, const Truncation& rule) {
    const bool has_top_k = rule.top_k < row.size();
    float threshold = rule.floor;
    if (!has_top_k && !(rule.top_p < 1.0)) return threshold;
    const uint32_t last = std::min(depth_of(rule.floor), MAX_DEPTH);
    depths_.clear();
    if (has_top_k) {
      const std::vector<float>& kept = row.greatest_values(rule.top_k);
      const float least = *std::min_element(kept.begin(), kept.end());
      threshold = std::max(threshold, scaled_of(least, rule));
      if (!(rule.top_p < 1.0)) return threshold;
      for (float value : kept) add_depth(depth_of(scaled_of(value, rule)), last);
    } else {
      add_row(row, rule, last);
    }
    const int64_t found = depth_at(rule.top_p);
    return found < 0 ? threshold : std::max(threshold, -bits_as<float>(static_cast<uint32_t>(found)));
  }

 private:
  static constexpr uint32_t MAX_DEPTH = 0x41f00000u;  // 30: from 28.5 on, masses are 0
  static constexpr int NUM_BUCKETS = (MAX_DEPTH >> 20) + 1;
  static_assert(NUM_BUCKETS > 960 && NUM_BUCKETS >= 1 << 10, "for parts, and for digits of ten bits");

  void add_depth(uint32_t depth, uint32_t last) {
    if (depth <= last) depths_.push_back(depth);
  }

  void add_row(const LogitRow& row, const Truncation& rule, uint32_t last) {
    uint32_t depths[BLOCK];
    for (int64_t b = 0; b < row.num_blocks(); ++b) {
      if (depth_of(scaled_of(row.block_max(b), rule)) > last) continue;
      vuint deepest = {};
      for (int64_t i = 0; i < BLOCK; i += LANES) {
        vfloat scaled = (load_floats(row.block(b) + i) - rule.max) / rule.divisor;
        vuint depth = bits_as<vuint>(scaled) & 0x7fffffffu;
        store(depths + i, depth);
        deepest = depth > deepest ? depth : deepest;
      }
      uint32_t most = 0;
      for (int i = 0; i < LANES; ++i) most = deepest[i] > most ? deepest[i] : most;
      if (most <= last) {
        depths_.insert(depths_.end(), depths, depths + BLOCK);
      } else {
        for (uint32_t depth : depths) add_depth(depth, last);
      }
    }
  }

  // The least depth up to which masses sum up to top_p of them all, or -1 if rounding puts that beyond the last.
  int64_t depth_at(double top_p) {
    add_masses([](vuint depths) { return parts_of(depths); });
    int64_t total = 0;
    for (int64_t mass : sums_) total += mass;
    const int64_t target = static_cast<int64_t>(std::ceil(static_cast<double>(total) * top_p));
    int64_t below = 0;
    const int part = find_bucket(below, target);
    if (part < 0) return -1;
    keep_part(part);
    uint32_t found = 0;
    for (int shift = 20; shift >= 0; shift -= 10) {
      const uint32_t mask = shift == 20 ? 0xfffu : 0x3ffu;
      add_masses([=](vuint depths) { return (depths >> shift) & mask; });
      const uint32_t digit = static_cast<uint32_t>(find_bucket(below, target));
      found |= digit << shift;
      size_t count = 0;
      for (uint32_t depth : depths_) {
        depths_[count] = depth;
        count += ((depth >> shift) & mask) == digit;
      }
      depths_.resize(count);
    }
    return found;
  }

  // Parts of equal width: neighbours in the row seldom have the same one.
  QUIRE_INLINE vuint parts_of(vuint depths) {
    return bits_as<vuint>(__builtin_convertvector(bits_as<vfloat>(depths) * 32.0f, vint));
  }

  // The first bucket up to which sums reach the target, or -1; `below` is the sum before it.
  int find_bucket(int64_t& below, int64_t target) const {
    for (int bucket = 0; bucket < NUM_BUCKETS; ++bucket) {
      if (below + sums_[bucket] >= target) return bucket;
      below += sums_[bucket];
    }
    return -1;
  }

  void keep_part(int part) {
    size_t count = 0, first = 0;
    for (; first + LANES <= depths_.size(); first += LANES) {
      const vuint depths = load<vuint>(&depths_[first]);
      const vint matches = bits_as<vint>(parts_of(depths)) == part;
#if defined(__AVX512F__) && QUIRE_LANES == 16
      const __mmask16 mask = _mm512_test_epi32_mask((__m512i)matches, (__m512i)matches);
      store(&depths_[count], (vuint)_mm512_maskz_compress_epi32(mask, (__m512i)depths));
      count += static_cast<size_t>(__builtin_popcount(mask));
#else
      for (int i = 0; i < LANES; ++i) {
        depths_[count] = depths[i];
        count -= static_cast<size_t>(static_cast<int64_t>(matches[i]));  // -1 where it matches
      }
#endif
    }
    for (; first < depths_.size(); ++first)
      if (static_cast<int>(bits_as<float>(depths_[first]) * 32.0f) == part) depths_[count++] = depths_[first];
    depths_.resize(count);
  }

  template <class F>
  void add_masses(F buckets_of) {
    std::fill(sums_, sums_ + NUM_BUCKETS, 0);
    std::fill(other_sums_, other_sums_ + NUM_BUCKETS, 0);
    int64_t masses[BLOCK];
    uint32_t buckets[BLOCK], some[BLOCK];
    for (size_t first = 0; first < depths_.size(); first += BLOCK) {
      const size_t count = std::min<size_t>(BLOCK, depths_.size() - first);
      const uint32_t* depths = &depths_[first];
      if (count < BLOCK) {
        std::copy(depths, depths + count, some);
        std::fill(some + count, some + BLOCK, 0);
        depths = some;
      }
      for (int64_t i = 0; i < BLOCK; i += LANES) {
        store_masses(masses + i, load<vuint>(depths + i));
        store(buckets + i, buckets_of(load<vuint>(depths + i)));
      }
      // Two tables, so that neighbours of one bucket do not wait for each other.
      for (size_t i = 0; i + 1 < count; i += 2) {
        sums_[buckets[i]] += masses[i];
        other_sums_[buckets[i + 1]] += masses[i + 1];
      }
      if (count % 2) sums_[buckets[count - 1]] += masses[count - 1];
    }
    for (int i = 0; i < NUM_BUCKETS; ++i) sums_[i] += other_sums_[i];
  }

  std::vector<uint32_t> depths_;
  int64_t sums_[NUM_BUCKETS], other_sums_[NUM_BUCKETS];
};

}  // namespace quire
