// Attention of an iteration, over keys and values in the dtype of the queries. Attention over int8 has its own file, so
// that the two compile in parallel.

#include "attention_unit.h"

namespace quire {

// first: cache; second: plan; number: scale
void run_attention(const Operation& op) {
  Plan& plan = *static_cast<Plan*>(op.second);
  const Cache& cache = *static_cast<const Cache*>(op.first);
  if (cache.int8) return attend_int8(plan, cache, op);
  with_storage(cache.half, [&](auto zero) { attend<decltype(zero), decltype(zero)>(plan, cache, op); });
}

}  // namespace quire
