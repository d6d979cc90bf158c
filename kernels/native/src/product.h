// Matrix products with weights that were packed once, in float32 sums; the caller says what to do with the sums.
//
// Weights lie in panels of PANEL outputs (product_words.h), as float, bfloat16 or int8 with a scale for each output.
// Each sum runs over the inputs in one order, with one accumulator, for any number of rows: a row's result does not
// depend on the other rows. Knows rows and strides, no layers.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "product_words.h"
#include "simd.h"
#include "team.h"

namespace quire {

constexpr int64_t CHUNK = 256;                      // inputs at a time with all rows: their weights stay in L1
constexpr int64_t BLOCK_BYTES = 384 << 10;          // of rows that are multiplied with a panel: they stay in L2
constexpr int64_t TILED_BLOCK_BYTES = 1 << 20;      // the same where there are tiles: such processors have 2 MB of it
constexpr int64_t MAX_BLOCK = 12 * ROWS;            // rows
constexpr int64_t MAX_TILED_BLOCK = 256;            // the same where they are multiplied as tiles
constexpr int64_t MIN_PARALLEL = 1 << 15;           // multiplications
constexpr int64_t GROUPS_PER_THREAD = 8;            // so that a delayed thread does not delay the others
constexpr int MAX_SIDE = 4;                         // panels side by side
constexpr int64_t TURN = 8;                         // steps between two looks ahead
constexpr int64_t LINE = 64;                        // bytes of a cache line

// Weights to prefetch while others are multiplied, some lines each turn, so that memory and products overlap.
struct Ahead {
  const char* at;
  int64_t lines;

  void fetch() {
    for (int64_t i = 0; i < lines; ++i, at += LINE) __builtin_prefetch(at, 0, 2);
  }
};

// Adds the products of NUM_ROWS rows and SIDE panels over `size` inputs to sums [rows][PANEL] of each panel.
template <int NUM_ROWS, int SIDE, class M>
__attribute__((noinline)) void multiply(const typename M::Input* x, int64_t stride, const typename M::Weight* weights,
                                        int64_t panel_size, int64_t size, float* sums, int64_t sums_size,
                                        Ahead ahead) {
  vfloat acc[NUM_ROWS][SIDE][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < NUM_ROWS; ++r)
#pragma GCC unroll 16
    for (int side = 0; side < SIDE; ++side)
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; ++v)
        acc[r][side][v] = load<vfloat>(sums + side * sums_size + r * PANEL + v * LANES);
  for (int64_t turn = 0; turn < size; turn += TURN * M::STEP) {
    ahead.fetch();
    int64_t end = std::min(turn + TURN * M::STEP, size);
#pragma GCC unroll 2
    for (int64_t k = turn; k < end; k += M::STEP) {
      typename M::Word words[SIDE][VECTORS];
#pragma GCC unroll 16
      for (int side = 0; side < SIDE; ++side) M::load_words(weights + side * panel_size + k * PANEL, words[side]);
#pragma GCC unroll 16
      for (int r = 0; r < NUM_ROWS; ++r) {
        typename M::Word inputs = M::spread(x + r * stride + k);
#pragma GCC unroll 16
        for (int side = 0; side < SIDE; ++side)
#pragma GCC unroll 16
          for (int v = 0; v < VECTORS; ++v) acc[r][side][v] = M::add(acc[r][side][v], inputs, words[side][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < NUM_ROWS; ++r)
#pragma GCC unroll 16
    for (int side = 0; side < SIDE; ++side)
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; ++v)
        store(sums + side * sums_size + r * PANEL + v * LANES, acc[r][side][v]);
}

// All rows with one panel, at most ROWS at a time and about as many each time. What lies `next` is fetched meanwhile.
template <class M>
void multiply_all(const typename M::Input* x, int64_t stride, int64_t num_rows, const typename M::Weight* weights,
                  int64_t size, float* sums, const void* next, int64_t next_bytes) {
  constexpr int64_t INPUTS = TURN * M::STEP;
  int64_t num_chunks = (num_rows + ROWS - 1) / ROWS, turns = (size + INPUTS - 1) / INPUTS;
  Ahead ahead = {static_cast<const char*>(next), (next_bytes / LINE + num_chunks * turns - 1) / (num_chunks * turns)};
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    int64_t row = num_rows * chunk / num_chunks, end = num_rows * (chunk + 1) / num_chunks;
    const typename M::Input* from = x + row * stride;
    float* to = sums + row * PANEL;
    switch (end - row) {
#define QUIRE_ROWS(n)                                                                    \
  case n:                                                                                \
    multiply<(n < ROWS ? n : ROWS), 1, M>(from, stride, weights, 0, size, to, 0, ahead); \
    break;
      QUIRE_ROWS(1) QUIRE_ROWS(2) QUIRE_ROWS(3) QUIRE_ROWS(4) QUIRE_ROWS(5) QUIRE_ROWS(6)
      QUIRE_ROWS(7) QUIRE_ROWS(8) QUIRE_ROWS(9) QUIRE_ROWS(10) QUIRE_ROWS(11) QUIRE_ROWS(12)
#undef QUIRE_ROWS
    }
    ahead.at += ahead.lines * LINE * turns;
  }
}

#if QUIRE_TILES
// Sums 0 to 3, rows 4 and 5, weights 6 and 7: `first` and `second` rows (second may be 0) by a panel's two tiles.
class ProductTiles {
 public:
  void shape(int64_t first, int64_t second) {
    if (first == first_ && second == second_) return;
    first_ = first;
    second_ = second;
    tiles_.load({{first}, {first}, {second}, {second}, {first}, {second}, {TILE_ROWS}, {TILE_ROWS}});
  }

 private:
  Tiles tiles_;
  int64_t first_ = 0, second_ = 0;
};

// All rows with one panel, up to 32 at a time: two tiles of rows by the panel's two tiles of weights. A row's sums run
// over the inputs tile by tile, whatever rows are beside it. `is_first`: sums begin at zero.
inline void multiply_tiles(const bf16* x, int64_t stride, int64_t num_rows, const bf16* weights, int64_t size,
                           float* sums, bool is_first, const void* next, int64_t next_bytes,
                           ProductTiles& tiles) {
  static_assert(PANEL == 32 && LINE == 64, "a panel is two tiles wide");
  constexpr int64_t ROW = PANEL * sizeof(float);  // bytes of a row of sums, and of a pair of inputs of a panel
  constexpr int64_t BOTH = 2 * TILE_ROWS;
  int64_t num_groups = (num_rows + BOTH - 1) / BOTH, steps = num_groups * (size / TILE_INPUTS);
  Ahead ahead = {static_cast<const char*>(next), (next_bytes / LINE + steps - 1) / steps};
  stored_for_tiles();
  for (int64_t row = 0; row < num_rows; row += BOTH) {
    int64_t first = std::min(TILE_ROWS, num_rows - row), second = std::min(BOTH, num_rows - row) - first;
    const bf16 *above = x + row * stride, *below = above + TILE_ROWS * stride;
    float *to = sums + row * PANEL, *to_below = to + TILE_ROWS * PANEL;
    tiles.shape(first, second);
    if (is_first) {
      _tile_zero(0);
      _tile_zero(1);
    } else {
      _tile_loadd(0, to, ROW);
      _tile_loadd(1, to + LANES, ROW);
    }
    if (second) {
      if (is_first) {
        _tile_zero(2);
        _tile_zero(3);
      } else {
        _tile_loadd(2, to_below, ROW);
        _tile_loadd(3, to_below + LANES, ROW);
      }
      for (int64_t k = 0; k < size; k += TILE_INPUTS) {
        ahead.fetch();
        _tile_loadd(6, weights + k * PANEL, ROW);
        _tile_loadd(4, above + k, stride * sizeof(bf16));
        _tile_loadd(5, below + k, stride * sizeof(bf16));
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + k * PANEL + 2 * LANES, ROW);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(2, to_below, ROW);
      _tile_stored(3, to_below + LANES, ROW);
    } else {
      for (int64_t k = 0; k < size; k += TILE_INPUTS) {
        ahead.fetch();
        _tile_loadd(4, above + k, stride * sizeof(bf16));
        _tile_loadd(6, weights + k * PANEL, ROW);
        _tile_loadd(7, weights + k * PANEL + 2 * LANES, ROW);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
    }
    _tile_stored(0, to, ROW);
    _tile_stored(1, to + LANES, ROW);
  }
}
#endif

// Operands of a product. M: how to multiply. S: storage of bias and outputs, float or bf16.
template <class M, class S>
struct ProductCall {
  const typename M::Input* x;
  int64_t stride, num_rows, num_inputs;
  const typename M::Weight* weights;
  const float* scales;  // [num_outputs] or null
  const S* bias;        // [num_outputs] or null
  int64_t num_outputs;
};

// A vector of sums of one row as outputs, from output `begin` on. Lanes beyond the last output are `beyond`.
template <class M, class S>
QUIRE_INLINE vfloat outputs_of(const ProductCall<M, S>& call, const float* sums, int64_t begin, float beyond) {
  if (begin + LANES <= call.num_outputs) {
    vfloat out = load<vfloat>(sums);
    if (call.scales) out *= load<vfloat>(call.scales + begin);
    if (call.bias) out += load_floats(call.bias + begin);
    return out;
  }
  float lanes[LANES];
  for (int64_t i = 0; i < LANES; ++i) {
    int64_t output = begin + i;
    lanes[i] = output < call.num_outputs ? sums[i] * (call.scales ? call.scales[output] : 1.0f) : beyond;
    if (call.bias && output < call.num_outputs) lanes[i] += to_float(call.bias[output]);
  }
  return load<vfloat>(lanes);
}

// Rows that are multiplied with a panel before the next one is taken.
template <class M>
struct BlockRows {
  static constexpr int64_t AT_ONCE = M::TILED ? 32 : ROWS, MOST = M::TILED ? MAX_TILED_BLOCK : MAX_BLOCK;
  static constexpr int64_t BYTES = M::TILED ? TILED_BLOCK_BYTES : BLOCK_BYTES;
};

// Panels [begin, end) with many rows, a chunk of a panel at a time with all of them.
template <class M, class S, class Out>
void many_rows(const ProductCall<M, S>& call, int64_t first_row, int64_t num_rows, int64_t begin, int64_t end,
               Out& out) {
  alignas(64) float sums[BlockRows<M>::MOST * PANEL];
  const typename M::Input* x = call.x + first_row * call.stride;
#if QUIRE_TILES
  ProductTiles tiles;
#endif
  for (int64_t panel = begin; panel < end; ++panel) {
    const typename M::Weight* weights = call.weights + panel * call.num_inputs * PANEL;
    if constexpr (!M::TILED) std::memset(sums, 0, num_rows * PANEL * sizeof(float));
    for (int64_t k = 0; k < call.num_inputs; k += CHUNK) {
      int64_t size = std::min(CHUNK, call.num_inputs - k), bytes = size * PANEL * sizeof(typename M::Weight);
      const void* next = weights + (k + size) * PANEL;  // of this panel or of the one behind it
#if QUIRE_TILES
      if constexpr (M::TILED) {
        multiply_tiles(x + k, call.stride, num_rows, weights + k * PANEL, size, sums, k == 0, next, bytes, tiles);
        continue;
      }
#endif
      multiply_all<M>(x + k, call.stride, num_rows, weights + k * PANEL, size, sums, next, bytes);
    }
    out.take(sums, num_rows, panel);
  }
}

// Panels [begin, end) with so few rows that several panels side by side keep the processor busy.
template <int NUM_ROWS, int SIDE, class M, class S, class Out>
void few_rows(const ProductCall<M, S>& call, int64_t begin, int64_t end, Out& out) {
  alignas(64) float sums[SIDE * NUM_ROWS * PANEL];
  int64_t panel_size = call.num_inputs * PANEL;
  int64_t panel = begin;
  for (; panel + SIDE <= end; panel += SIDE) {
    std::memset(sums, 0, sizeof(sums));
    multiply<NUM_ROWS, SIDE, M>(call.x, call.stride, call.weights + panel * panel_size, panel_size, call.num_inputs,
                                sums, NUM_ROWS * PANEL, Ahead{nullptr, 0});
    for (int side = 0; side < SIDE; ++side) out.take(sums + side * NUM_ROWS * PANEL, NUM_ROWS, panel + side);
  }
  if (panel < end) many_rows(call, 0, NUM_ROWS, panel, end, out);
}

template <class M, class S, class Out>
void panels(const ProductCall<M, S>& call, int64_t first_row, int64_t num_rows, int64_t begin, int64_t end, Out& out) {
  if constexpr (!M::TILED) {
    if (call.num_rows == 1) return few_rows<1, 4>(call, begin, end, out);
    if (call.num_rows == 2) return few_rows<2, 2>(call, begin, end, out);
    // Two panels of narrower weights, with the constants to widen them, do not fit the registers.
    if (call.num_rows == 3 && sizeof(typename M::Weight) == sizeof(float)) return few_rows<3, 2>(call, begin, end, out);
  }
  many_rows(call, first_row, num_rows, begin, end, out);
}

inline int64_t num_panels_of(int64_t num_outputs) { return (num_outputs + PANEL - 1) / PANEL; }

// Division of a product's outputs among threads: blocks of rows by groups of panels.
template <class M>
struct Parts {
  int64_t block, num_blocks, group, num_groups, num_panels;  // rows and panels

  Parts(int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int num_threads) {
    constexpr int64_t AT_ONCE = BlockRows<M>::AT_ONCE, MOST = BlockRows<M>::MOST;
    int64_t row_bytes = num_inputs * sizeof(typename M::Input);
    num_panels = num_panels_of(num_outputs);
    int64_t most = std::clamp<int64_t>(BlockRows<M>::BYTES / row_bytes, AT_ONCE, MOST);
    num_blocks = (num_rows + most - 1) / most;
    block = (num_rows + num_blocks - 1) / num_blocks;
    block = std::min((block + AT_ONCE - 1) / AT_ONCE * AT_ONCE, MOST);
    num_blocks = (num_rows + block - 1) / block;
    group = std::max<int64_t>(num_panels / (num_threads * GROUPS_PER_THREAD), 1);
    group = (group + MAX_SIDE - 1) / MAX_SIDE * MAX_SIDE;
    num_groups = (num_panels + group - 1) / group;
  }
};

// make_out(first_row, num_rows, group) makes what takes the sums of these rows, in the order of the group's panels:
// take(sums [num_rows][PANEL], num_rows, panel) for each, and then end().
template <class M, class S, class MakeOut>
void product(const ProductCall<M, S>& call, const Parts<M>& parts, int num_threads, MakeOut make_out) {
  bool parallel = num_threads > 1 && call.num_rows * call.num_outputs * call.num_inputs > MIN_PARALLEL;
  share(parallel ? num_threads : 1, parts.num_blocks * parts.num_groups, [&](int64_t i, int) {
    int64_t first_row = i % parts.num_blocks * parts.block, number = i / parts.num_blocks;
    int64_t num_rows = std::min(parts.block, call.num_rows - first_row), begin = number * parts.group;
    auto out = make_out(first_row, num_rows, number);
    panels(call, first_row, num_rows, begin, std::min(begin + parts.group, parts.num_panels), out);
    out.end();
  });
}

// Inputs of packed weights: whole steps.
template <class M>
int64_t packed_inputs(int64_t num_inputs) {
  return (num_inputs + M::STEP - 1) / M::STEP * M::STEP;
}

// Takes rows of `size` inputs as they are multiplied: unchanged, or copied to whole steps.
template <class M, class S>
void take_rows(ProductCall<M, S>& call, const S* x, int64_t size) {
  typedef typename M::Input T;
  if constexpr (std::is_same<T, S>::value) {
    call.x = x;
    if (call.num_inputs == size) return;
  }
  // In memory of this thread. A stride beside powers of two keeps rows apart in the caches.
  static thread_local std::vector<T> buffer;
  int64_t stride = call.num_inputs + 16;
  if (static_cast<int64_t>(buffer.size()) < call.num_rows * stride) buffer.resize(call.num_rows * stride);
  for (int64_t row = 0; row < call.num_rows; ++row) {
    T* to = buffer.data() + row * stride;
    copy_floats(to, x + row * call.stride, size);
    std::fill(to + size, to + call.num_inputs, T{});
  }
  call.x = buffer.data();
  call.stride = stride;
}

// function(call, parts) for an operation. first: packed weights, int8 where there are scales, else as rows; second:
// scales, or null; third: bias, or null
template <class F>
void with_product(const Operation& op, int64_t num_rows, int num_threads, F&& function) {
  if (num_rows == 0) return;
  with_types(op.half, op.second, [&](auto multiplied, auto zero) {
    typedef decltype(multiplied) M;
    typedef decltype(zero) S;
    ProductCall<M, S> call = {nullptr, op.x_stride, num_rows, packed_inputs<M>(op.num_inputs),
                              static_cast<const typename M::Weight*>(op.first), static_cast<const float*>(op.second),
                              static_cast<const S*>(op.third), op.num_outputs};
    take_rows(call, static_cast<const S*>(op.x), op.num_inputs);
    function(call, Parts<M>(num_rows, call.num_inputs, op.num_outputs, num_threads));
  });
}

}  // namespace quire
