// Attention of an iteration over keys and values in int8, which are widened in registers. Sums are in float32.

#include "attention_unit.h"

namespace quire {

void attend_int8(Plan& plan, const Cache& cache, const Rows& rows) {
  if (cache.half)
    attend<bf16, int8_t>(plan, cache, rows);
  else
    attend<float, int8_t>(plan, cache, rows);
}

}  // namespace quire
