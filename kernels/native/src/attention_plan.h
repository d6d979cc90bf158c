// Division of one iteration's attention into units of work, and their scratch memory.
#pragma once

#include <cstdint>
#include <vector>

namespace quire {

constexpr int MAX_UNIT_ROWS = 32;  // query heads times tokens
// Keys are attended in parts that begin at multiples of this, and parts are merged in order, on any thread. So a row's
// result does not depend on the other rows, on the chunks of its prompt or on the number of threads.
constexpr int PART_KEYS = 256;

struct Unit {
  int row;
  int first_head, num_heads;      // query heads, of one key-value head, or of several with a single query
  int first_query, num_queries;   // tokens of the row's queries
  int64_t first_token;            // of these queries, in the query tensor
  int first_position;             // of the first query in its row's context
  int first_key, last_key;        // keys, the last one not included
  int partial;                    // index of its first part's results, to be merged; -1: the unit has all keys
};

// Keys of the same queries in several units: the results of their parts from `first` on are merged.
struct Merge {
  int first, count;
  int unit;  // any of them
};

struct Plan {
  int num_heads, num_kv_heads, head_dim, block_size;
  int window;  // 0: none
  int num_threads;
  const int32_t* block_tables;
  int64_t table_stride;
  std::vector<Unit> units;
  std::vector<int> order;  // of units, the longest first
  std::vector<Merge> merges;
  std::vector<float> partials;  // [partial][MAX_UNIT_ROWS][greatest score, sum of weights, padded_dim results]
  std::vector<float> scratch;   // [thread][scratch_floats]

  int padded_dim() const { return (head_dim + 15) / 16 * 16; }
  int64_t partial_floats() const { return static_cast<int64_t>(MAX_UNIT_ROWS) * (padded_dim() + 2); }
  int64_t scratch_floats() const;
};

}  // namespace quire
