// Products into memory, out = x W^T + b, and the packing of weights for all products. Knows rows, no layers.

#include "product.h"

namespace quire {

namespace {

// Writes outputs to rows.
template <class S>
class Written {
 public:
  Written(const ProductCall<S>& call, S* out, int64_t stride) : call_(call), out_(out), stride_(stride) {}

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
  const ProductCall<S>& call_;
  S* out_;
  int64_t stride_;
};

template <class S>
void write_product(int kind, const S* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const void* weights,
                   const float* scales, const S* bias, S* out, int64_t out_stride, int64_t num_outputs,
                   int num_threads) {
  if (num_rows == 0) return;
  FloatRows rows = float_rows(x, x_stride, num_rows, num_inputs);
  ProductCall<S> call = {rows.x, rows.stride, num_rows, num_inputs, weights, scales, bias, num_outputs};
  Parts parts(num_rows, num_inputs, num_outputs, num_threads);
  product_by(kind, call, parts, num_threads, [&](int64_t first_row, int64_t, int64_t) {
    return Written<S>(call, out + first_row * out_stride, out_stride);
  });
}

// Where an output of a panel lies. Those of two bytes lie as pairs, one of each of two vectors.
template <class T>
int64_t place_of(int64_t output) {
  if (sizeof(T) != sizeof(bf16)) return output;
  int64_t pair = output / (2 * LANES), lane = output % LANES, second = output / LANES % 2;
  return (pair * LANES + lane) * 2 + second;
}

template <class T>
void pack(const T* weight, int64_t num_outputs, int64_t num_inputs, T* packed, int num_threads) {
  int64_t num_panels = (num_outputs + PANEL - 1) / PANEL;
  share(num_threads, num_panels, [&](int64_t panel, int) {
    for (int64_t i = 0; i < PANEL; ++i) {
      int64_t output = panel * PANEL + i, place = place_of<T>(i);
      for (int64_t k = 0; k < num_inputs; ++k)
        packed[(panel * num_inputs + k) * PANEL + place] = output < num_outputs ? weight[output * num_inputs + k] : T{};
    }
  });
}

}  // namespace

}  // namespace quire

extern "C" {

// Outputs of a panel: packed weights have a whole number of panels.
int quire_panel() { return quire::PANEL; }

// weight: [num_outputs, num_inputs], contiguous, of 4, 2 or 1 bytes
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

// kind: of the weights: 0 float, 1 bfloat16, 2 int8 with scales; half: x, bias and out are bfloat16, else float
void quire_product(int kind, const void* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs,
                   const void* weights, const float* scales, const void* bias, void* out, int64_t out_stride,
                   int64_t num_outputs, int half, int num_threads) {
  if (half)
    quire::write_product(kind, static_cast<const quire::bf16*>(x), x_stride, num_rows, num_inputs, weights, scales,
                         static_cast<const quire::bf16*>(bias), static_cast<quire::bf16*>(out), out_stride,
                         num_outputs, num_threads);
  else
    quire::write_product(kind, static_cast<const float*>(x), x_stride, num_rows, num_inputs, weights, scales,
                         static_cast<const float*>(bias), static_cast<float*>(out), out_stride, num_outputs,
                         num_threads);
}
}
