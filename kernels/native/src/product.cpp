// Matrix products with weights that were packed once: out = x W^T + b, float32 sums.
//
// Weights lie in panels of PANEL outputs, [in][PANEL] each, as float, bfloat16 or int8 with a scale for each output.
// Each sum runs over the inputs in one order, with one accumulator, whatever the number of rows: a row's result
// does not depend on the rows beside it. Knows rows and strides, no layers.

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "simd.h"
#include "team.h"

namespace quire {

namespace {

#if defined(__AVX512F__)
constexpr int VECTORS = 2, ROWS = 12;
#elif defined(__aarch64__)
constexpr int VECTORS = 4, ROWS = 6;
#else
constexpr int VECTORS = 2, ROWS = 6;
#endif
constexpr int PANEL = VECTORS * LANES;
constexpr int64_t CHUNK = 256;                      // inputs at a time with all rows: their weights stay in L1
constexpr int64_t BLOCK_BYTES = 384 << 10;          // of rows that are multiplied with a panel: they stay in L2
constexpr int64_t MAX_BLOCK = 10 * ROWS;            // rows
constexpr int64_t MIN_PARALLEL = 1 << 15;           // multiplications
constexpr int64_t GROUPS_PER_THREAD = 8;            // so that a thread that was held up does not hold up the other
constexpr int MAX_SIDE = 4;                         // panels side by side
constexpr int64_t TURN = 8;                         // inputs between two looks ahead
constexpr int64_t LINE = 64;                        // bytes of a cache line

// In all lanes: a broadcast from memory, since x - 0 is x for every x, as x + 0 is not.
QUIRE_INLINE vfloat spread(float x) { return x - vfloat{}; }

// The weights of a panel for one input, as floats.
template <class W>
QUIRE_INLINE void load_weights(const W* p, vfloat* weights) {
#pragma GCC unroll 16
  for (int v = 0; v < VECTORS; ++v) weights[v] = load_floats(p + v * LANES);
}
// Two vectors lie as pairs, since to part them takes one instruction each.
QUIRE_INLINE void load_weights(const bf16* p, vfloat* weights) {
#pragma GCC unroll 16
  for (int v = 0; v < VECTORS; v += 2) {
    vuint pairs = load<vuint>(p + v * LANES);
    weights[v] = first_of(pairs);
    weights[v + 1] = second_of(pairs);
  }
}

// Weights that are fetched while others are multiplied, some lines at each turn: memory and products share the time.
struct Ahead {
  const char* at;
  int64_t lines;

  void fetch() {
    for (int64_t i = 0; i < lines; ++i, at += LINE) __builtin_prefetch(at, 0, 2);
  }
};

// Adds the products of NUM_ROWS rows and SIDE panels over `size` inputs to sums [rows][PANEL] of each panel.
template <int NUM_ROWS, int SIDE, class W>
QUIRE_INLINE void multiply(const float* x, int64_t stride, const W* weights, int64_t panel_size, int64_t size,
                           float* sums, int64_t sums_size, Ahead ahead) {
  vfloat acc[NUM_ROWS][SIDE * VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < NUM_ROWS; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < SIDE * VECTORS; ++v)
      acc[r][v] = load<vfloat>(sums + v / VECTORS * sums_size + r * PANEL + v % VECTORS * LANES);
  for (int64_t turn = 0; turn < size; turn += TURN) {
    ahead.fetch();
    int64_t end = std::min(turn + TURN, size);
#pragma GCC unroll 2
    for (int64_t k = turn; k < end; ++k) {
      vfloat w[SIDE * VECTORS];
#pragma GCC unroll 16
      for (int side = 0; side < SIDE; ++side)
        load_weights(weights + side * panel_size + k * PANEL, w + side * VECTORS);
#pragma GCC unroll 16
      for (int r = 0; r < NUM_ROWS; ++r) {
        vfloat a = spread(x[r * stride + k]);
#pragma GCC unroll 16
        for (int v = 0; v < SIDE * VECTORS; ++v) acc[r][v] += a * w[v];
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < NUM_ROWS; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < SIDE * VECTORS; ++v)
      store(sums + v / VECTORS * sums_size + r * PANEL + v % VECTORS * LANES, acc[r][v]);
}

template <int NUM_ROWS, int SIDE, class W>
__attribute__((noinline)) void multiply_rows(const float* x, int64_t stride, const W* weights, int64_t panel_size,
                                             int64_t size, float* sums, int64_t sums_size, Ahead ahead) {
  multiply<NUM_ROWS, SIDE, W>(x, stride, weights, panel_size, size, sums, sums_size, ahead);
}

// All rows with one panel, at most ROWS at a time and about as many each time. What lies `next` is fetched meanwhile.
template <class W>
void multiply_all(const float* x, int64_t stride, int64_t num_rows, const W* weights, int64_t size, float* sums,
                  const void* next, int64_t next_bytes) {
  int64_t num_chunks = (num_rows + ROWS - 1) / ROWS, turns = num_chunks * ((size + TURN - 1) / TURN);
  Ahead ahead = {static_cast<const char*>(next), (next_bytes / LINE + turns - 1) / turns};
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    int64_t row = num_rows * chunk / num_chunks, end = num_rows * (chunk + 1) / num_chunks;
    const float* from = x + row * stride;
    float* to = sums + row * PANEL;
    switch (end - row) {
#define QUIRE_ROWS(n)                                                                         \
  case n:                                                                                     \
    multiply_rows<(n < ROWS ? n : ROWS), 1, W>(from, stride, weights, 0, size, to, 0, ahead); \
    break;
      QUIRE_ROWS(1) QUIRE_ROWS(2) QUIRE_ROWS(3) QUIRE_ROWS(4) QUIRE_ROWS(5) QUIRE_ROWS(6)
      QUIRE_ROWS(7) QUIRE_ROWS(8) QUIRE_ROWS(9) QUIRE_ROWS(10) QUIRE_ROWS(11) QUIRE_ROWS(12)
#undef QUIRE_ROWS
    }
    ahead.at += ahead.lines * LINE * ((size + TURN - 1) / TURN);
  }
}

template <class S>
struct Call {
  const float* x;
  int64_t stride, num_rows, num_inputs;
  const void* weights;
  const float* scales;  // [num_outputs] or null
  const S* bias;        // [num_outputs] or null
  S* out;
  int64_t out_stride, num_outputs;
};

template <class S>
void finish(const Call<S>& call, const float* sums, int64_t first_row, int64_t num_rows, int64_t panel) {
  int64_t begin = panel * PANEL, width = std::min<int64_t>(PANEL, call.num_outputs - begin);
  for (int64_t r = 0; r < num_rows; ++r) {
    const float* from = sums + r * PANEL;
    S* to = call.out + (first_row + r) * call.out_stride + begin;
    if (width == PANEL) {
      for (int v = 0; v < VECTORS; ++v) {
        vfloat sum = load<vfloat>(from + v * LANES);
        if (call.scales) sum *= load<vfloat>(call.scales + begin + v * LANES);
        if (call.bias) sum += load_floats(call.bias + begin + v * LANES);
        store_floats(to + v * LANES, sum);
      }
      continue;
    }
    for (int64_t i = 0; i < width; ++i) {
      float sum = from[i];
      if (call.scales) sum *= call.scales[begin + i];
      if (call.bias) sum += to_float(call.bias[begin + i]);
      set_float(to[i], sum);
    }
  }
}

// Panels [begin, end) with many rows, a chunk of a panel at a time with all of them.
template <class S, class W>
void many_rows(const Call<S>& call, int64_t first_row, int64_t num_rows, int64_t begin, int64_t end) {
  alignas(64) float sums[MAX_BLOCK * PANEL];
  const float* x = call.x + first_row * call.stride;
  for (int64_t panel = begin; panel < end; ++panel) {
    const W* weights = static_cast<const W*>(call.weights) + panel * call.num_inputs * PANEL;
    std::memset(sums, 0, num_rows * PANEL * sizeof(float));
    for (int64_t k = 0; k < call.num_inputs; k += CHUNK) {
      int64_t size = std::min(CHUNK, call.num_inputs - k), bytes = size * PANEL * sizeof(W);
      const W *chunk = weights + k * PANEL, *next = chunk + size * PANEL;  // of this panel or of the one behind it
      multiply_all(x + k, call.stride, num_rows, chunk, size, sums, next, bytes);
    }
    finish(call, sums, first_row, num_rows, panel);
  }
}

// Panels [begin, end) with so few rows that several panels side by side keep the processor busy.
template <int NUM_ROWS, int SIDE, class S, class W>
void few_rows(const Call<S>& call, int64_t begin, int64_t end) {
  alignas(64) float sums[SIDE * NUM_ROWS * PANEL];
  int64_t panel_size = call.num_inputs * PANEL;
  int64_t panel = begin;
  for (; panel + SIDE <= end; panel += SIDE) {
    std::memset(sums, 0, sizeof(sums));
    multiply_rows<NUM_ROWS, SIDE, W>(call.x, call.stride, static_cast<const W*>(call.weights) + panel * panel_size,
                                     panel_size, call.num_inputs, sums, NUM_ROWS * PANEL, Ahead{nullptr, 0});
    for (int side = 0; side < SIDE; ++side)
      finish(call, sums + side * NUM_ROWS * PANEL, 0, NUM_ROWS, panel + side);
  }
  if (panel < end) many_rows<S, W>(call, 0, NUM_ROWS, panel, end);
}

template <class S, class W>
void panels(const Call<S>& call, int64_t first_row, int64_t num_rows, int64_t begin, int64_t end) {
  if (call.num_rows == 1) return few_rows<1, 4, S, W>(call, begin, end);
  if (call.num_rows == 2) return few_rows<2, 2, S, W>(call, begin, end);
  // Of narrower weights, two panels and what they are widened with do not fit the registers.
  if (call.num_rows == 3 && sizeof(W) == sizeof(float)) return few_rows<3, 2, S, W>(call, begin, end);
  many_rows<S, W>(call, first_row, num_rows, begin, end);
}

template <class S, class W>
void product(const Call<S>& call, int num_threads) {
  if (call.num_rows == 0) return;
  int64_t num_panels = (call.num_outputs + PANEL - 1) / PANEL, row_bytes = call.num_inputs * sizeof(float);
  int64_t most = std::clamp<int64_t>(BLOCK_BYTES / row_bytes, ROWS, MAX_BLOCK);
  int64_t num_blocks = (call.num_rows + most - 1) / most;
  int64_t block = (call.num_rows + num_blocks - 1) / num_blocks;
  block = std::min((block + ROWS - 1) / ROWS * ROWS, MAX_BLOCK);
  num_blocks = (call.num_rows + block - 1) / block;
  int64_t group = std::max<int64_t>(num_panels / (num_threads * GROUPS_PER_THREAD), 1);
  group = (group + MAX_SIDE - 1) / MAX_SIDE * MAX_SIDE;
  int64_t num_groups = (num_panels + group - 1) / group;
  bool parallel = num_threads > 1 && call.num_rows * call.num_outputs * call.num_inputs > MIN_PARALLEL;
  share(parallel ? num_threads : 1, num_blocks * num_groups, [&](int64_t i, int) {
    int64_t first_row = i / num_groups * block, begin = i % num_groups * group;
    panels<S, W>(call, first_row, std::min(block, call.num_rows - first_row), begin,
                 std::min(begin + group, num_panels));
  });
}

template <class S>
void product_by(int kind, const Call<S>& call, int num_threads) {
  if (kind == 0) return product<S, float>(call, num_threads);
  if (kind == 1) return product<S, bf16>(call, num_threads);
  product<S, int8_t>(call, num_threads);
}

// Rows of bfloat16 as floats, in memory of this thread. A stride beside powers of two keeps rows apart in the caches.
const float* widened_rows(const bf16* x, int64_t stride, int64_t num_rows, int64_t size, int64_t wide_stride) {
  static thread_local std::vector<float> buffer;
  if (static_cast<int64_t>(buffer.size()) < num_rows * wide_stride) buffer.resize(num_rows * wide_stride);
  float* wide = buffer.data();
  for (int64_t row = 0; row < num_rows; ++row) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(wide + row * wide_stride + i, load_floats(x + row * stride + i));
    for (; i < size; ++i) wide[row * wide_stride + i] = to_float(x[row * stride + i]);
  }
  return wide;
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
  if (half) {
    int64_t stride = num_inputs + 16;
    const float* wide =
        quire::widened_rows(static_cast<const quire::bf16*>(x), x_stride, num_rows, num_inputs, stride);
    quire::Call<quire::bf16> call = {wide, stride, num_rows, num_inputs, weights, scales,
                                     static_cast<const quire::bf16*>(bias), static_cast<quire::bf16*>(out), out_stride,
                                     num_outputs};
    quire::product_by(kind, call, num_threads);
  } else {
    quire::Call<float> call = {static_cast<const float*>(x), x_stride, num_rows, num_inputs, weights, scales,
                               static_cast<const float*>(bias), static_cast<float*>(out), out_stride, num_outputs};
    quire::product_by(kind, call, num_threads);
  }
}
}
