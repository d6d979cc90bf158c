// Divides the ragged rows of an iteration into units of about equal work, for any number of threads.
//
// A unit is some queries of one row with the query heads of one key-value head. A unit of a single query takes several
// key-value heads, which are contiguous in a block and so are read in one run, unless that leaves too few units. Keys
// are divided among units only if whole units would leave threads idle.

#include "attention_plan.h"

#include <algorithm>

#include "attention_tiles.h"
#include "cache.h"

namespace quire {

namespace {

constexpr int UNITS_PER_THREAD = 4;  // so that threads end at about the same time

int64_t cost(const Unit& unit) {
  // Includes the work on the queries themselves, and the start of a unit.
  return static_cast<int64_t>(unit.last_key - unit.first_key + TILE) * (unit.num_heads * unit.num_queries + 2);
}

// Query heads of a unit: all or some of one key-value head's, or all of several.
int unit_heads(const Plan& plan, int64_t num_rows, int num_queries, int num_keys) {
  int group = plan.num_heads / plan.num_kv_heads;
  if (group >= MAX_UNIT_ROWS) return MAX_UNIT_ROWS;
  int64_t units = num_rows * std::max(1, num_keys / PART_KEYS);
  if (num_queries > 1 || units < plan.num_threads * UNITS_PER_THREAD) return group;
  return std::min(MAX_UNIT_ROWS / group, plan.num_kv_heads) * group;
}

void add_row(Plan& plan, int64_t num_rows, int row, int64_t first_token, int num_queries, int context) {
  int group = plan.num_heads / plan.num_kv_heads;
  int keys = plan.window ? std::min(plan.window, context) : context;
  int heads = unit_heads(plan, num_rows, num_queries, keys);
  int step = std::max(group, heads);  // from one unit's first head to that of the next group of units
  int queries = std::max(1, MAX_UNIT_ROWS / heads);
  for (int query = 0; query < num_queries; query += queries) {
    Unit unit;
    unit.row = row;
    unit.first_query = query;
    unit.num_queries = std::min(queries, num_queries - query);
    unit.first_token = first_token + query;
    unit.first_position = context - num_queries + query;
    unit.first_key = plan.window ? std::max(0, unit.first_position - plan.window + 1) : 0;
    unit.last_key = unit.first_position + unit.num_queries;
    unit.partial = -1;
    for (int first = 0; first < plan.num_heads; first += step) {
      int last = std::min(first + step, plan.num_heads);
      for (int head = first; head < last; head += heads) {
        unit.first_head = head;
        unit.num_heads = std::min(heads, last - head);
        plan.units.push_back(unit);
      }
    }
  }
}

int num_parts(const Unit& unit) { return (unit.last_key - 1) / PART_KEYS - unit.first_key / PART_KEYS + 1; }

// Divides the keys of the longest units until no unit has much more than its share.
void split_long_units(Plan& plan) {
  int64_t total = 0;
  for (const Unit& unit : plan.units) total += cost(unit);
  int64_t share = std::max<int64_t>(1, total / (plan.num_threads * UNITS_PER_THREAD));
  size_t num_whole = plan.units.size();
  int num_partials = 0;
  for (size_t i = 0; i < num_whole && plan.num_threads > 1; ++i) {
    Unit whole = plan.units[i];
    int parts = num_parts(whole);
    int splits = static_cast<int>(std::min<int64_t>(cost(whole) / share, parts));
    if (splits < 2) continue;
    plan.merges.push_back({num_partials, parts, static_cast<int>(i)});
    for (int split = 0; split < splits; ++split) {
      int begin = parts * split / splits, end = parts * (split + 1) / splits;
      int first_part = whole.first_key / PART_KEYS;
      Unit unit = whole;
      unit.first_key = std::max(whole.first_key, (first_part + begin) * PART_KEYS);
      unit.last_key = std::min(whole.last_key, (first_part + end) * PART_KEYS);
      unit.partial = num_partials + begin;
      if (split == 0)
        plan.units[i] = unit;
      else
        plan.units.push_back(unit);
    }
    num_partials += parts;
  }
  size_t floats = num_partials * plan.partial_floats();
  if (plan.partials.size() < floats) plan.partials.resize(floats);
}

}  // namespace

int64_t Plan::scratch_floats() const {
  int64_t dims = padded_dim();
  int64_t queries_and_results = 2 * MAX_UNIT_ROWS * dims + MAX_UNIT_ROWS * (dims + 2);
  int64_t scores_and_weights = 2 * MAX_UNIT_ROWS * TILE;
  int64_t gathered = 2 * TILE * dims;  // plain blocks, and pairs of values with one token that must not be read
  return queries_and_results + scores_and_weights + gathered + 64;
}

}  // namespace quire

using quire::Plan;

extern "C" {

Plan* quire_plan_new() { return new Plan(); }

void quire_plan_delete(Plan* plan) { delete plan; }

void quire_plan_fill(Plan* plan, const quire::Cache* cache, const int32_t* query_start, const int32_t* context_lens,
                     int64_t num_rows, const int32_t* block_tables, int64_t table_stride, int window,
                     int num_threads) {
  plan->num_heads = cache->num_heads;
  plan->num_kv_heads = cache->num_kv_heads;
  plan->head_dim = cache->head_dim;
  plan->block_size = cache->block_size;
  plan->window = window;
  plan->num_threads = num_threads;
  plan->block_tables = block_tables;
  plan->table_stride = table_stride;
  plan->units.clear();
  plan->merges.clear();
  for (int64_t row = 0; row < num_rows; ++row) {
    int num_queries = query_start[row + 1] - query_start[row];
    if (num_queries > 0)
      quire::add_row(*plan, num_rows, static_cast<int>(row), query_start[row], num_queries, context_lens[row]);
  }
  quire::split_long_units(*plan);
  // Merges refer to units by index, so the order of work is a separate list.
  plan->order.resize(plan->units.size());
  for (size_t i = 0; i < plan->order.size(); ++i) plan->order[i] = static_cast<int>(i);
  const std::vector<quire::Unit>& units = plan->units;
  std::sort(plan->order.begin(), plan->order.end(), [&](int a, int b) {
    int64_t first = quire::cost(units[a]), second = quire::cost(units[b]);
    return first != second ? first > second : a < b;
  });
  size_t floats = num_threads * plan->scratch_floats();
  if (plan->scratch.size() < floats) plan->scratch.resize(floats);
}

int64_t quire_plan_num_units(const Plan* plan) { return static_cast<int64_t>(plan->units.size()); }
}
