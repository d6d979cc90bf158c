// Addresses of the keys and values of a unit, and the tile to prefetch. Knows a plan, no words.
#pragma once

#include <algorithm>

#include "attention_plan.h"
#include "attention_tiles.h"
#include "cache.h"

namespace quire {

// K: storage of keys and values.
template <class K>
struct UnitKeys {
  UnitKeys(const Plan& plan, const Unit& unit) : table(plan.block_tables + unit.row * plan.table_stride) {
    int group = plan.num_heads / plan.num_kv_heads;
    num_kv_heads = std::max(1, unit.num_heads / group);
    head_stride = head_numel<K>(plan.block_size, plan.head_dim);
    head_offset = unit.first_head / group * head_stride;
    first_key = unit.first_key;
    last_key = unit.last_key;
  }

  int64_t offset_of(int head) const { return head_offset + head * head_stride; }

  const int32_t* table;
  int num_kv_heads;
  int64_t head_offset, head_stride;  // in a block: of the first of the key-value heads, and between them
  int first_key, last_key;
};

// The keys of one head that are scored together.
template <class K>
struct TileOf {
  const UnitKeys<K>* keys;
  int head, first_key;  // a multiple of TILE

  // Groups of the tile that belong to the unit.
  int first_group() const { return std::max(0, keys->first_key - first_key) / GROUP; }
  int last_group() const { return (std::min(TILE, keys->last_key - first_key) - 1) / GROUP; }
};

// `count` tiles behind this one, all heads of a tile's keys before the next keys; behind the unit's last, the next
// unit's.
template <class K>
TileOf<K> tile_ahead(const TileOf<K>& tile, int count, const UnitKeys<K>& next) {
  const UnitKeys<K>& keys = *tile.keys;
  int head = tile.head + count, key = tile.first_key + head / keys.num_kv_heads * TILE;
  head %= keys.num_kv_heads;
  if (key < keys.last_key) return {&keys, head, key};
  int num_beyond = (key - keys.last_key) / TILE * keys.num_kv_heads + head;
  key = next.first_key / TILE * TILE + num_beyond / next.num_kv_heads * TILE;
  return {&next, num_beyond % next.num_kv_heads, std::min(key, (next.last_key - 1) / TILE * TILE)};
}

}  // namespace quire
