// Matrix tiles (Intel AMX): 16 rows of 64 bytes each, and one instruction that multiplies two of them in bfloat16.
// Knows no kernel. Where a compiler has no such instructions QUIRE_TILES is 0 and nothing else is here.
#pragma once

#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__) && QUIRE_PAIRS && QUIRE_LANES == 16
#define QUIRE_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define QUIRE_TILES 0
#endif

namespace quire {

#if QUIRE_TILES

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_INPUTS = 32;  // bfloat16 in a row of a tile

// True if the kernel lets this process use tiles; asked once, for all threads.
inline bool tiles_allowed() {
  static const bool allowed = [] {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
  }();
  return allowed;
}

// Shapes of this thread's tiles while it lives: sums 0 to 3, rows 4 and 5, weights 6 and 7. Loading shapes clears all
// tiles, so it is done only where the number of rows differs.
class Tiles {
 public:
  Tiles() = default;
  ~Tiles() {
    if (first_) _tile_release();
  }
  Tiles(const Tiles&) = delete;

  // Sums of `first` and `second` rows (second may be 0), each of two tiles side by side.
  inline __attribute__((always_inline)) void shape(int64_t first, int64_t second) {
    if (first == first_ && second == second_) return;
    load_shapes(first, second);
  }

 private:
  __attribute__((noinline)) void load_shapes(int64_t first, int64_t second) {
    struct alignas(64) Shapes {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    const int64_t rows[8] = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS};
    for (int tile = 0; tile < 8; ++tile) {
      if (!rows[tile]) continue;
      shapes.rows[tile] = static_cast<uint8_t>(rows[tile]);
      shapes.row_bytes[tile] = 64;
    }
    asm volatile("" : : "m"(shapes));  // GCC 12 takes only the first bytes of what is loaded for read
    _tile_loadconfig(&shapes);
    first_ = first;
    second_ = second;
  }

  int64_t first_ = 0, second_ = 0;
};

#endif

}  // namespace quire
