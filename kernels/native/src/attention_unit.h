// One unit of attention over keys and values in their blocks, tile by tile; and all units of a plan. Knows a plan, no
// model; the plan lists the slots that a unit reads.
//
// Scores of keys in int8 are multiplied by the keys' scales, and weights by the values'.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_call.h"
#include "attention_keys.h"
#include "attention_plan.h"
#include "attention_softmax.h"
#include "attention_tiles.h"
#include "cache.h"
#include "kernels.h"
#include "team.h"
#include "tiles.h"

namespace quire {

// Calls f(number of rows as a constant, first row) for rows in chunks whose sums fit in registers.
template <class F>
QUIRE_INLINE void in_chunks(int num_rows, F f) {
  int num_chunks = (num_rows + MAX_SUM_ROWS - 1) / MAX_SUM_ROWS;
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    int first = num_rows * chunk / num_chunks, last = num_rows * (chunk + 1) / num_chunks;
    switch (last - first) {
      case 1: f(std::integral_constant<int, 1>(), first); break;
      case 2: f(std::integral_constant<int, 2>(), first); break;
      case 3: f(std::integral_constant<int, 3>(), first); break;
      case 4: f(std::integral_constant<int, 4>(), first); break;
      case 5: f(std::integral_constant<int, 5>(), first); break;
      default: f(std::integral_constant<int, 6>(), first);
    }
  }
}

// One unit's work. PACKED blocks are read in place; plain ones are gathered into packed tiles of floats.
template <class S, class K, bool PACKED>
class UnitAttention {
 public:
  // next: the unit that this thread will probably take next, or the same unit
  UnitAttention(const Plan& plan, const Unit& unit, const Unit& next, const Call<S, K>& call, float* scratch)
      : plan_(plan),
        unit_(unit),
        call_(call),
        dims_(plan.padded_dim()),
        num_rows_(unit.num_heads * unit.num_queries),
        keys_(plan, unit),
        next_keys_(plan, next) {
    rows_per_kv_head_ = num_rows_ / keys_.num_kv_heads;
    results_ = scratch;
    merged_ = results_ + MAX_UNIT_ROWS * dims_;
    queries_ = reinterpret_cast<Factor*>(merged_ + MAX_UNIT_ROWS * (dims_ + 2));
    scores_ = reinterpret_cast<float*>(queries_) + MAX_UNIT_ROWS * dims_;
    weights_ = reinterpret_cast<Factor*>(P::ROUNDS ? scores_ + MAX_UNIT_ROWS * TILE : scores_);
    gathered_ = scores_ + 2 * MAX_UNIT_ROWS * TILE;
  }

  void attend() {
    take_queries();
#if QUIRE_TILES
    if constexpr (CAN_TILE)
      if (is_tiled_) {
        int64_t first = std::min<int64_t>(TILE_ROWS, rows_per_kv_head_), second = rows_per_kv_head_ - first;
        tiles_.load({{first}, {second}, {first}, {second}, {TILE_ROWS}, {first, 32}, {second, 32}, {GROUP / 2}});
      }
#endif
    int first_part = unit_.first_key / PART_KEYS, part = first_part;
    for (; part * PART_KEYS < unit_.last_key; ++part) {
      attend_part(std::max(unit_.first_key, part * PART_KEYS), std::min(unit_.last_key, (part + 1) * PART_KEYS));
      float* to = merged_;
      if (unit_.partial >= 0) to = call_.partials + (unit_.partial + part - first_part) * plan_.partial_floats();
      for (int row = 0; row < num_rows_; ++row, to += dims_ + 2) {
        float greatest = softmax_[row].greatest, sum = sum_of(softmax_[row].sums);
        if (unit_.partial < 0 && part > first_part) {
          merge_part(to, greatest, sum, results_ + row * dims_, dims_);
        } else {
          to[0] = greatest;
          to[1] = sum;
          std::memcpy(to + 2, results_ + row * dims_, dims_ * sizeof(float));
        }
      }
    }
    if (unit_.partial < 0) give_results(plan_, unit_, call_, merged_);
  }

 private:
  typedef Products<typename std::conditional<PACKED, K, float>::type> P;
  typedef typename P::Word Word;
  typedef typename P::Factor Factor;
  static constexpr int ROW_FACTORS = P::FACTORS;
  static constexpr bool SCALED = PACKED && std::is_same<K, int8_t>::value;
  // True if rows use the processor's tiles: always or never, so that a row's bits do not depend on the other rows.
  static constexpr bool CAN_TILE = QUIRE_TILES && PACKED && std::is_same<K, bf16>::value;
  // Number of tiles ahead to prefetch.
  static constexpr int TILES_AHEAD = 2;

  int64_t query_factors() const { return dims_ / P::STEP * P::FACTORS; }
  static constexpr int64_t weight_factors() { return TILE / P::STEP * P::FACTORS; }

  void take_queries() {
    for (int row = 0; row < num_rows_; ++row) {
      const S* from = call_.query + (unit_.first_token + row / unit_.num_heads) * call_.query_stride +
                      (unit_.first_head + row % unit_.num_heads) * plan_.head_dim;
      Factor* to = queries_ + row * query_factors();
      if constexpr (P::ROUNDS) {
        std::memcpy(to, from, plan_.head_dim * sizeof(S));
      } else {
        copy_floats(to, from, plan_.head_dim);
        for (int64_t d = plan_.head_dim; d < dims_; ++d) to[d] = 0.0f;
      }
    }
  }

  void attend_part(int first_key, int last_key) {
    std::fill(results_, results_ + num_rows_ * dims_, 0.0f);
    std::fill(softmax_, softmax_ + num_rows_, Softmax());
    for (int key = first_key / TILE * TILE; key < last_key; key += TILE)
      for (int head = 0; head < keys_.num_kv_heads; ++head)
        attend_tile(head, key, std::max(0, first_key - key), std::min(TILE, last_key - key));
  }

  // The keys from key + first to key + last, the last one not included, of one of the unit's key-value heads.
  void attend_tile(int head, int key, int first, int last) {
    int num_groups = (last + GROUP - 1) / GROUP;
    int first_row = head * rows_per_kv_head_;
    const Word *keys[TILE_GROUPS], *values[TILE_GROUPS], *next_keys[TILE_GROUPS], *next_values[TILE_GROUPS];
    int64_t word_stride;
    if constexpr (PACKED) {
      TileOf<K> tile = {&keys_, head, key};
      find_groups(tile, keys, values);
      find_groups(tile_ahead(tile, TILES_AHEAD, next_keys_), next_keys, next_values);
      word_stride = plan_.block_size;
      if constexpr (SCALED) find_scales(head, key, first, last);
    } else {
      gather_groups(head, key, first, last, keys, values);
      std::copy(keys, keys + TILE_GROUPS, next_keys);
      std::copy(values, values + TILE_GROUPS, next_values);
      word_stride = TILE;
    }
#if QUIRE_TILES
    if constexpr (CAN_TILE)
      if (is_tiled_) {
        score_by_tiles(first_row, keys, next_keys, first / GROUP, num_groups);
        weigh_scores(first_row, key, first, last);
        weigh_by_tiles(first_row, values, next_values, first, last);
        return;
      }
#endif
    // Some rows after the others, so that the tile, and the scores of these rows, stay in the first cache.
    in_chunks(rows_per_kv_head_, [&](auto rows, int row) {
      row += first_row;
      score_tile<P, rows()>(keys, next_keys, num_groups, word_stride, static_cast<int>(dims_ / P::STEP),
                            queries_ + row * query_factors(), query_factors(), scores_ + row * TILE);
      weigh_rows(row, rows(), key, first, last);
      if constexpr (P::STEP == 2)
        if (first % 2) weigh_half<rows()>(row, values, first / 2, 0xffff0000u);
      weigh<rows()>(row, values, next_values, (first + P::STEP - 1) / P::STEP, last / P::STEP);
      if constexpr (P::STEP == 2)
        if (last % 2) weigh_half<rows()>(row, values, last / 2, 0x0000ffffu);
    });
  }

  // A group that must not be read is replaced by a readable one, whose results are not used.
  void find_groups(const TileOf<K>& tile, const Word** keys, const Word** values) const {
    int64_t head_offset = tile.keys->offset_of(tile.head);
    for (int g = 0; g < TILE_GROUPS; ++g) {
      int position = tile.first_key + std::clamp(g, tile.first_group(), tile.last_group()) * GROUP;
      int64_t block = tile.keys->table[position / plan_.block_size];
      int offset = position % plan_.block_size;
      const K* k = call_.keys + block * call_.key_block_stride + head_offset;
      const K* v = call_.values + block * call_.value_block_stride + head_offset;
      keys[g] = reinterpret_cast<const Word*>(k) + offset;
      values[g] = reinterpret_cast<const Word*>(v) + offset / P::STEP * plan_.head_dim;
    }
  }

  // Copies the scales of the tile's own slots and puts zeros for the others.
  void find_scales(int head, int key, int first, int last) {
    constexpr int64_t GROUP_BYTES = GROUP * sizeof(float);
    int64_t behind = keys_.offset_of(head) + plan_.block_size * plan_.head_dim;
    std::fill(key_scales_, key_scales_ + TILE, 0.0f);
    std::fill(value_scales_, value_scales_ + TILE, 0.0f);
    for (int i = first / GROUP * GROUP; i < last; i += GROUP) {
      int64_t block = keys_.table[(key + i) / plan_.block_size];
      int64_t place = behind + (key + i) % plan_.block_size * static_cast<int64_t>(sizeof(float));
      std::memcpy(key_scales_ + i, call_.keys + block * call_.key_block_stride + place, GROUP_BYTES);
      std::memcpy(value_scales_ + i, call_.values + block * call_.value_block_stride + place, GROUP_BYTES);
    }
    int last_group = (last + GROUP - 1) / GROUP * GROUP;
    for (float* scales : {key_scales_, value_scales_}) {
      std::fill(scales + first / GROUP * GROUP, scales + first, 0.0f);
      std::fill(scales + last, scales + last_group, 0.0f);
    }
  }

  // Copies the tile's own slots and puts zeros for the others.
  void gather_groups(int head, int key, int first, int last, const float** keys, const float** values) {
    float *k = gathered_, *v = gathered_ + TILE * dims_;  // [dims, TILE] and [TILE, dims]
    std::fill(k, v + TILE * dims_, 0.0f);
    for (int i = first; i < last; ++i) {
      int64_t block = keys_.table[(key + i) / plan_.block_size];
      int offset = (key + i) % plan_.block_size;
      const K* head_k = call_.keys + block * call_.key_block_stride + keys_.offset_of(head);
      const K* head_v = call_.values + block * call_.value_block_stride + keys_.offset_of(head);
      const K *from_k = head_k + offset * plan_.head_dim, *from_v = head_v + offset * plan_.head_dim;
      float k_scale = 1.0f, v_scale = 1.0f;
      if constexpr (std::is_same<K, int8_t>::value) {
        int64_t place = plan_.block_size * plan_.head_dim + offset * static_cast<int64_t>(sizeof(float));
        k_scale = load<float>(head_k + place);
        v_scale = load<float>(head_v + place);
      }
      for (int d = 0; d < plan_.head_dim; ++d) {
        k[d * TILE + i] = to_float(from_k[d]) * k_scale;
        v[i * dims_ + d] = to_float(from_v[d]) * v_scale;
      }
    }
    for (int g = 0; g < TILE_GROUPS; ++g) {
      keys[g] = k + g * GROUP;
      values[g] = v + g * GROUP * dims_;
    }
  }

  // Scores of some rows into weights, at most LANES.
  void weigh_rows(int first_row, int num_rows, int key, int first, int last) {
    Seen seen[LANES];
    float greatest[LANES], factors[LANES];
    for (int i = 0; i < num_rows; ++i) {
      int position = unit_.first_position + (first_row + i) / unit_.num_heads - key;
      seen[i] = {plan_.window ? std::max(first, position - plan_.window + 1) : first, std::min(last, position + 1)};
      float* scores = scores_ + (first_row + i) * TILE;
      if constexpr (SCALED) multiply_tile(scores, key_scales_);
      greatest[i] = greatest_of(scores, seen[i]);
    }
    raise_greatest(greatest, call_.scale, num_rows, softmax_ + first_row, factors);
    for (int i = 0; i < num_rows; ++i) {
      int row = first_row + i;
      float *scores = scores_ + row * TILE, *results = results_ + row * dims_;
      weights_of(scores, seen[i], call_.scale, softmax_[row]);
      if constexpr (SCALED) multiply_tile(scores, value_scales_);
      if (factors[i] != 1.0f)
        for (int64_t d = 0; d < dims_; d += LANES) store(results + d, load<vfloat>(results + d) * factors[i]);
      if constexpr (P::ROUNDS) {
        bf16* to = reinterpret_cast<bf16*>(weights_ + row * weight_factors());
        for (int k = 0; k < TILE; k += LANES) store_floats(to + k, load<vfloat>(scores + k));
      }
    }
  }

  template <int ROWS>
  void weigh(int row, const Word* const* values, const Word* const* ahead, int first_word, int last_word) {
    if (first_word >= last_word) return;
    weigh_tile<P, ROWS>(values, ahead, first_word, last_word, dims_, weights_ + row * weight_factors(),
                        weight_factors(), results_ + row * dims_);
  }

  // A pair of tokens of which one must not be read: its half is cleared first.
  template <int ROWS>
  void weigh_half(int row, const Word* const* values, int word, uint32_t mask) {
    constexpr int GROUP_WORDS = GROUP / P::STEP;
    const Word* from = values[word / GROUP_WORDS] + word % GROUP_WORDS * dims_;
    uint32_t* cleared = reinterpret_cast<uint32_t*>(gathered_);
    for (int64_t d = 0; d < dims_; ++d) cleared[d] = bits_as<uint32_t>(from[d]) & mask;
    const Word* cleared_values[TILE_GROUPS];
    for (const Word*& group : cleared_values) group = reinterpret_cast<const Word*>(gathered_);
    weigh_tile<P, ROWS>(cleared_values, cleared_values, 0, 1, dims_, weights_ + row * weight_factors() + word * ROW_FACTORS,
                        weight_factors(), results_ + row * dims_);
  }

#if QUIRE_TILES
  // Scores of one key-value head's rows into weights.
  void weigh_scores(int first_row, int key, int first, int last) {
    for (int row = 0; row < rows_per_kv_head_; row += LANES)
      weigh_rows(first_row + row, std::min(LANES, rows_per_kv_head_ - row), key, first, last);
  }

  // As score_tile. Tiles 0 and 1 are scores, 2 and 3 queries of up to 16 rows each, 4 is 32 dimensions of 16 keys.
  void score_by_tiles(int first_row, const Word* const* keys, const Word* const* ahead, int first_group,
                      int num_groups) {
    const int64_t key_stride = plan_.block_size * sizeof(Word), query_stride = dims_ * sizeof(bf16);
    const bool has_second = rows_per_kv_head_ > TILE_ROWS;
    const Factor *queries = queries_ + first_row * query_factors(), *below = queries + TILE_ROWS * query_factors();
    float* scores = scores_ + first_row * TILE;
    stored_for_tiles();
    for (int g = first_group; g < num_groups; ++g) {
      _tile_zero(0);
      if (has_second) _tile_zero(1);
      for (int64_t word = 0; word < dims_ / 2; word += TILE_ROWS) {
        for (int64_t i = 0; i < TILE_ROWS; ++i) fetch_ahead(ahead[g] + (word + i) * plan_.block_size);
        _tile_loadd(4, keys[g] + word * plan_.block_size, key_stride);
        _tile_loadd(2, queries + word, query_stride);
        _tile_dpbf16ps(0, 2, 4);
        if (has_second) {
          _tile_loadd(3, below + word, query_stride);
          _tile_dpbf16ps(1, 3, 4);
        }
      }
      _tile_stored(0, scores + g * GROUP, TILE * sizeof(float));
      if (has_second) _tile_stored(1, scores + TILE_ROWS * TILE + g * GROUP, TILE * sizeof(float));
    }
  }

  // Adds the weighted values of tokens from first to last. Tiles 0 to 3 are results, 5 and 6 weights of 16 tokens, 7 is
  // 16 dimensions of their values. Values that must not be read are zeros in a copy of their group.
  void weigh_by_tiles(int first_row, const Word* const* values, const Word* const* ahead, int first, int last) {
    const int64_t value_stride = dims_ * sizeof(Word), result_stride = dims_ * sizeof(float);
    const int64_t weight_stride = weight_factors() * sizeof(Factor), group_words = GROUP / 2 * dims_;
    const bool has_second = rows_per_kv_head_ > TILE_ROWS;
    const int first_group = first / GROUP, num_groups = (last + GROUP - 1) / GROUP;
    const Factor* weights = weights_ + first_row * weight_factors();
    float* results = results_ + first_row * dims_;
    const Word* groups[TILE_GROUPS];
    for (int g = first_group; g < num_groups; ++g) {
      groups[g] = values[g];
      if (g * GROUP >= first && (g + 1) * GROUP <= last) continue;
      uint32_t* copy = reinterpret_cast<uint32_t*>(gathered_) + g * group_words;
      for (int pair = 0; pair < GROUP / 2; ++pair) {
        int token = g * GROUP + 2 * pair;
        uint32_t mask = (token >= first && token < last ? 0x0000ffffu : 0) |
                        (token + 1 >= first && token + 1 < last ? 0xffff0000u : 0);
        for (int64_t d = 0; d < dims_; ++d) copy[pair * dims_ + d] = values[g][pair * dims_ + d] & mask;
      }
      groups[g] = copy;
    }
    const int64_t side = GROUP, below = TILE_ROWS * dims_;
    stored_for_tiles();
    for (int64_t d = 0; d < dims_; d += 2 * side) {
      _tile_loadd(0, results + d, result_stride);
      _tile_loadd(2, results + d + side, result_stride);
      if (has_second) {
        _tile_loadd(1, results + below + d, result_stride);
        _tile_loadd(3, results + below + d + side, result_stride);
      }
      for (int g = first_group; g < num_groups; ++g) {
        // The share of these dimensions of a group, in the order of memory.
        for (int64_t i = 0; i < GROUP; ++i) fetch_ahead(ahead[g] + (d / GROUP * (GROUP / 2) + i) * GROUP);
        _tile_loadd(5, weights + g * (GROUP / 2), weight_stride);
        _tile_loadd(7, groups[g] + d, value_stride);
        _tile_dpbf16ps(0, 5, 7);
        if (has_second) {
          _tile_loadd(6, weights + TILE_ROWS * weight_factors() + g * (GROUP / 2), weight_stride);
          _tile_dpbf16ps(1, 6, 7);
        }
        _tile_loadd(7, groups[g] + d + side, value_stride);
        _tile_dpbf16ps(2, 5, 7);
        if (has_second) _tile_dpbf16ps(3, 6, 7);
      }
      _tile_stored(0, results + d, result_stride);
      _tile_stored(2, results + d + side, result_stride);
      if (has_second) {
        _tile_stored(1, results + below + d, result_stride);
        _tile_stored(3, results + below + d + side, result_stride);
      }
    }
  }
#endif

  const Plan& plan_;
  const Unit& unit_;
  const Call<S, K>& call_;
  const int64_t dims_;
  const int num_rows_;
  const UnitKeys<K> keys_, next_keys_;
  int rows_per_kv_head_;
  float* results_;    // [num_rows, dims], of a part
  float* merged_;     // [num_rows, 2 + dims], as a partial
  Factor* queries_;   // [num_rows, query_factors]
  float* scores_;     // [num_rows, TILE]
  Factor* weights_;   // [num_rows, weight_factors], the scores' memory where they are not rounded
  float* gathered_;
  float key_scales_[TILE], value_scales_[TILE];  // of a tile of int8
  Softmax softmax_[MAX_UNIT_ROWS];
#if QUIRE_TILES
  Tiles tiles_;
  const bool is_tiled_ = CAN_TILE && dims_ % TILE_INPUTS == 0 && tiles_allowed();
#endif
};

template <class S, class K, bool PACKED>
void attend_units(Plan& plan, const Call<S, K>& call) {
  int64_t num_units = static_cast<int64_t>(plan.order.size()), num_merges = static_cast<int64_t>(plan.merges.size());
  share(plan.num_threads, num_units, [&](int64_t i, int thread) {
    float* scratch = plan.scratch.data() + thread * plan.scratch_floats();
    const Unit& unit = plan.units[plan.order[i]];
    const Unit& next = plan.units[plan.order[std::min(i + plan.num_threads, num_units - 1)]];
    UnitAttention<S, K, PACKED>(plan, unit, next, call, scratch).attend();
  });
  share(plan.num_threads, num_merges, [&](int64_t i, int) { merge(plan, plan.merges[i], call); });
}

template <class S, class K>
void attend(Plan& plan, const Cache& cache, const Operation& op) {
  Call<S, K> call = {static_cast<const S*>(op.x),
                     op.x_stride,
                     static_cast<S*>(op.out),
                     op.out_stride,
                     static_cast<const K*>(cache.keys),
                     static_cast<const K*>(cache.values),
                     cache.key_block_stride,
                     cache.value_block_stride,
                     op.number,
                     plan.partials.data()};
  if (is_packed(cache))
    attend_units<S, K, true>(plan, call);
  else
    attend_units<S, K, false>(plan, call);
}

// Over keys and values in int8. In attention_int8.cpp.
void attend_int8(Plan& plan, const Cache& cache, const Operation& op);

}  // namespace quire
