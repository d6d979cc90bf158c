// Products into memory, out = x W^T + b, and the packing of weights for all products. Knows rows, no layers.

#include "product.h"

namespace quire {

namespace {

// Writes outputs to rows.
template <class W, class S>
class Written {
 public:
  Written(const ProductCall<W, S>& call, S* out, int64_t stride) : call_(call), out_(out), stride_(stride) {}

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
  const ProductCall<W, S>& call_;
  S* out_;
  int64_t stride_;
};

template <class W, class S>
void write_product(const S* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const W* weights,
                   const float* scales, const S* bias, S* out, int64_t out_stride, int64_t num_outputs,
                   int num_threads) {
  if (num_rows == 0) return;
  Inputs<W> inputs = inputs_of<W>(x, x_stride, num_rows, num_inputs);
  ProductCall<W, S> call = {inputs.x, inputs.stride, num_rows, inputs.size, weights, scales, bias, num_outputs};
  Parts parts(num_rows, inputs.size * sizeof(InputOf<W>), num_outputs, num_threads);
  product(call, parts, num_threads, [&](int64_t first_row, int64_t, int64_t) {
    return Written<W, S>(call, out + first_row * out_stride, out_stride);
  });
}

// Where the weight of an output of a panel, for one input, lies in the panel.
template <class T>
int64_t place_of(int64_t output, int64_t input) {
  if (sizeof(T) != sizeof(bf16)) return input * PANEL + output;
  if (Multiplied<bf16>::STEP == 2) return input / 2 * 2 * PANEL + output * 2 + input % 2;
  // As pairs, one of each of two vectors.
  int64_t pair = output / (2 * LANES), lane = output % LANES, second = output / LANES % 2;
  return input * PANEL + (pair * LANES + lane) * 2 + second;
}

int64_t packed_inputs(int64_t num_inputs, int itemsize) {
  return itemsize == sizeof(bf16) ? whole_steps(num_inputs, Multiplied<bf16>::STEP) : num_inputs;
}

// What lies beyond the last output or input is left as it is.
template <class T>
void pack(const T* weight, int64_t num_outputs, int64_t num_inputs, T* packed, int num_threads) {
  int64_t num_panels = (num_outputs + PANEL - 1) / PANEL, panel_size = packed_inputs(num_inputs, sizeof(T)) * PANEL;
  share(num_threads, num_panels, [&](int64_t panel, int) {
    int64_t size = std::min<int64_t>(PANEL, num_outputs - panel * PANEL);
    for (int64_t i = 0; i < size; ++i) {
      const T* from = weight + (panel * PANEL + i) * num_inputs;
      for (int64_t k = 0; k < num_inputs; ++k) packed[panel * panel_size + place_of<T>(i, k)] = from[k];
    }
  });
}

}  // namespace

}  // namespace quire

extern "C" {

// Elements of packed weights, of 4, 2 or 1 bytes.
int64_t quire_packed_size(int64_t num_outputs, int64_t num_inputs, int itemsize) {
  return (num_outputs + quire::PANEL - 1) / quire::PANEL * quire::PANEL * quire::packed_inputs(num_inputs, itemsize);
}

// weight: [num_outputs, num_inputs], contiguous; packed: [quire_packed_size], zeros
void quire_pack(const void* weight, int64_t num_outputs, int64_t num_inputs, void* packed, int itemsize,
                int num_threads) {
  auto run = [&](auto zero) {
    typedef decltype(zero) T;
    quire::pack(static_cast<const T*>(weight), num_outputs, num_inputs, static_cast<T*>(packed), num_threads);
  };
  if (itemsize == 4)
    run(uint32_t());
  else if (itemsize == 2)
    run(uint16_t());
  else
    run(uint8_t());
}

// weights: int8 where there are scales, else as x; half: x, bias and out are bfloat16, else float
void quire_product(const void* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const void* weights,
                   const float* scales, const void* bias, void* out, int64_t out_stride, int64_t num_outputs, int half,
                   int num_threads) {
  quire::with_types(half, scales, [&](auto weight, auto row) {
    typedef decltype(weight) W;
    typedef decltype(row) S;
    quire::write_product(static_cast<const S*>(x), x_stride, num_rows, num_inputs, static_cast<const W*>(weights),
                         scales, static_cast<const S*>(bias), static_cast<S*>(out), out_stride, num_outputs,
                         num_threads);
  });
}
}
