// Threads that share a kernel's work. The caller works too and waits for no thread that has not begun: if another
// process takes a core, the caller computes the units of that core's thread.
#pragma once

#include <cstdint>
#include <type_traits>

namespace quire {

typedef void (*UnitFunction)(void* context, int64_t unit, int thread);

// Calls function(context, unit, thread) once for each unit in [0, count), on the caller and up to num_threads - 1
// others, in any order; returns when all are done. `thread` is in [0, num_threads) and unique among running units.
// A call during another caller's call works alone.
void share_units(int num_threads, int64_t count, UnitFunction function, void* context);

// While this object lives, at most so many threads share the work of this thread.
class ThreadLimit {
 public:
  explicit ThreadLimit(int num_threads);
  ~ThreadLimit();
  ThreadLimit(const ThreadLimit&) = delete;

 private:
  int before_;
};

// The same for anything that can be called with a unit and a thread.
template <class F>
void share(int num_threads, int64_t count, F&& function) {
  if (num_threads <= 1 || count <= 1) {
    for (int64_t unit = 0; unit < count; ++unit) function(unit, 0);
    return;
  }
  typedef std::remove_reference_t<F> Function;
  auto call = [](void* context, int64_t unit, int thread) { (*static_cast<Function*>(context))(unit, thread); };
  share_units(num_threads, count, call, const_cast<std::remove_const_t<Function>*>(&function));
}

// Rows [0, count) in pieces of about the same size: function(begin, end). `is_much`: worth sharing.
template <class F>
void share_rows(int num_threads, int64_t count, bool is_much, F&& function) {
  constexpr int64_t PIECES_PER_THREAD = 4;  // so that a delayed thread does not delay the others
  int64_t pieces = is_much ? num_threads * PIECES_PER_THREAD : 1;
  if (pieces > count) pieces = count;
  share(num_threads, pieces, [&](int64_t piece, int) {
    function(count * piece / pieces, count * (piece + 1) / pieces);
  });
}

}  // namespace quire
