// Shares work as a model does, in many sizes and from several callers, and looks whether every unit was done once, by
// one thread at a time. Then the threads must sleep. Ends with 0, or says what was wrong. An argument is the number of
// cores to keep to.

#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "team.h"

static std::atomic<int> faults{0};

static void expect(bool holds, const char* what) {
  if (!holds && faults.fetch_add(1) < 10) std::fprintf(stderr, "not so: %s\n", what);
}

static void call_often(unsigned seed, int num_calls, int max_threads) {
  std::minstd_rand random(seed);
  for (int call = 0; call < num_calls; ++call) {
    int count = static_cast<int>(random() % 40), num_threads = 1 + static_cast<int>(random() % max_threads);
    int work = static_cast<int>(random() % 200), limit = 1 + static_cast<int>(random() % max_threads);
    quire::ThreadLimit limited(limit);
    std::vector<int> times(count, 0);
    std::vector<std::atomic<int>> inside(max_threads);
    quire::share(num_threads, count, [&](int64_t unit, int thread) {
      expect(thread >= 0 && thread < num_threads, "a thread's number is below the number of threads");
      expect(thread < limit, "no more threads than the limit");
      expect(inside[thread].fetch_add(1) == 0, "nobody else has a thread's number meanwhile");
      for (volatile int i = 0; i < work; ++i) {
      }
      ++times[unit];
      inside[thread].fetch_sub(1);
    });
    for (int each : times) expect(each == 1, "every unit is done once when the call returns");
    std::vector<int> rows(count, 0);
    quire::share_rows(num_threads, count, work % 2, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) ++rows[row];
    });
    for (int each : rows) expect(each == 1, "every row is in one piece");
    if (random() % 50 == 0) usleep(300);  // they fall asleep
  }
}

static double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

static void keep_to_cores(int num_cores) {
  cpu_set_t ours, kept;
  CPU_ZERO(&kept);
  expect(sched_getaffinity(0, sizeof(ours), &ours) == 0, "the cores of this process can be asked for");
  for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&kept) < num_cores; ++core)
    if (CPU_ISSET(core, &ours)) CPU_SET(core, &kept);
  expect(sched_setaffinity(0, sizeof(kept), &kept) == 0, "this process can keep to some of its cores");
}

int main(int num_arguments, char** arguments) {
  if (num_arguments > 1) keep_to_cores(std::atoi(arguments[1]));
  call_often(1, 20000, 2);
  call_often(2, 3000, 7);
  std::vector<std::thread> callers;
  for (unsigned caller = 0; caller < 3; ++caller) callers.emplace_back(call_often, caller, 3000, 3);
  for (std::thread& caller : callers) caller.join();
  usleep(50000);
  double before = cpu_seconds();
  usleep(300000);
  expect(cpu_seconds() - before < 0.05, "who has nothing to do sleeps");
  return faults.load() != 0;
}
