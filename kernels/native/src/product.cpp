// Products into memory, out = x W^T + b, and the packing of weights for all products. Knows rows, no layers.

#include "product.h"

namespace quire {

namespace {

// Writes outputs to rows.
template <class M, class S>
class Written {
 public:
  Written(const ProductCall<M, S>& call, S* out, int64_t stride) : call_(call), out_(out), stride_(stride) {}

  void take(const float* sums, int64_t num_rows, int64_t panel) {
    for (int64_t row = 0; row < num_rows; ++row)
      for (int v = 0; v < VECTORS; ++v) {
        int64_t begin = panel * PANEL + v * LANES;
        vfloat outputs = outputs_of(call_, sums + row * PANEL + v * LANES, begin, 0.0f);
        S* to = out_ + row * stride_ + begin;
        if (begin + LANES <= call_.num_outputs)
          store_floats(to, outputs);
        else
          for (int64_t i = 0; begin + i < call_.num_outputs; ++i) set_float(to[i], outputs[i]);
      }
  }

  void end() {}

 private:
  const ProductCall<M, S>& call_;
  S* out_;
  int64_t stride_;
};

template <class M, class S>
void write_product(const ProductCall<M, S>& call, const Parts<M>& parts, const Operation& op, int num_threads) {
  product(call, parts, num_threads, [&](int64_t first_row, int64_t, int64_t) {
    return Written<M, S>(call, static_cast<S*>(op.out) + first_row * op.out_stride, op.out_stride);
  });
}

// Memory beyond the last output or input is not written.
template <class M>
void pack(const typename M::Weight* weight, int64_t num_outputs, int64_t num_inputs, typename M::Weight* packed,
          int num_threads) {
  int64_t panel_size = packed_inputs<M>(num_inputs) * PANEL;
  share(num_threads, num_panels_of(num_outputs), [&](int64_t panel, int) {
    int64_t size = std::min<int64_t>(PANEL, num_outputs - panel * PANEL);
    for (int64_t i = 0; i < size; ++i) {
      const typename M::Weight* from = weight + (panel * PANEL + i) * num_inputs;
      for (int64_t k = 0; k < num_inputs; ++k) packed[panel * panel_size + M::place_of(i, k)] = M::stored(from[k]);
    }
  });
}

}  // namespace

// Operands are those of with_product; out: as x
void run_product(const Operation& op, int64_t num_rows, int num_threads) {
  with_product(op, num_rows, num_threads,
               [&](const auto& call, const auto& parts) { write_product(call, parts, op, num_threads); });
}

}  // namespace quire

extern "C" {

// Elements of packed weights. half: rows are bfloat16, else float; int8: weights are, else as rows
int64_t quire_packed_size(int64_t num_outputs, int64_t num_inputs, int half, int int8) {
  int64_t size = quire::num_panels_of(num_outputs) * quire::PANEL;
  quire::with_types(half, int8, [&](auto multiplied, auto) {
    size *= quire::packed_inputs<decltype(multiplied)>(num_inputs);
  });
  return size;
}

// weight: [num_outputs, num_inputs], contiguous; packed: [quire_packed_size], zeros
void quire_pack(const void* weight, int64_t num_outputs, int64_t num_inputs, void* packed, int half, int int8,
                int num_threads) {
  quire::with_types(half, int8, [&](auto multiplied, auto) {
    typedef decltype(multiplied) M;
    typedef typename M::Weight W;
    quire::pack<M>(static_cast<const W*>(weight), num_outputs, num_inputs, static_cast<W*>(packed), num_threads);
  });
}
}
