// Attention of an iteration, over keys and values in the dtype of the queries. Attention over int8 has its own file, so
// that the two compile in parallel.

#include "attention_unit.h"
#include "kernels.h"

extern "C" void quire_attend(quire::Plan* plan, const quire::Cache* cache, const void* query, int64_t query_stride,
                             void* out, int64_t out_stride, float scale) {
  quire::Rows rows = {query, query_stride, out, out_stride, scale};
  if (cache->int8)
    quire::attend_int8(*plan, *cache, rows);
  else if (cache->half)
    quire::attend<quire::bf16, quire::bf16>(*plan, *cache, rows);
  else
    quire::attend<float, float>(*plan, *cache, rows);
}
