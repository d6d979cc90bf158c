/* Time of day of one process, set by a test: preloaded, it adds what a file says to what the system says.
 *
 * The file, named by CHAOS_WALL_CLOCK, holds nanoseconds as a signed 64-bit integer, and is read at every call.
 * Monotonic clocks stay as they are. Waits until a time of day (condition variables, semaphores, futexes) go by the
 * time that the process sees, and notice within SLICE_NS that it was set. Knows no service.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000LL
#define SLICE_NS 50000000LL
#define OLDEST_TIME_OF_DAY_S 1000000000LL /* a deadline below it is of a monotonic clock: 31 years of uptime */

static const volatile int64_t *offset_ns;
static int (*next_clock_gettime)(clockid_t, struct timespec *);
static int (*next_cond_timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*next_sem_timedwait)(sem_t *, const struct timespec *);
static long (*next_syscall)(long, ...);

__attribute__((constructor)) static void begin(void) {
    next_cond_timedwait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!next_cond_timedwait) next_cond_timedwait = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    next_sem_timedwait = dlsym(RTLD_NEXT, "sem_timedwait");
    next_syscall = dlsym(RTLD_NEXT, "syscall");
    next_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("CHAOS_WALL_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) abort(); /* who preloads it means to set the clock */
    void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) abort();
    close(file);
    offset_ns = page;
}

static int64_t offset(void) { return offset_ns ? *offset_ns : 0; }

static int64_t as_ns(const struct timespec *time) { return time->tv_sec * SECOND_NS + time->tv_nsec; }

static struct timespec as_timespec(int64_t ns) {
    struct timespec time = {ns / SECOND_NS, ns % SECOND_NS};
    return time;
}

static int real_time(clockid_t clock, struct timespec *time) {
    if (next_clock_gettime) return next_clock_gettime(clock, time);
    return (int)next_syscall(SYS_clock_gettime, clock, time); /* somebody's constructor came before ours */
}

static int64_t real_now_ns(void) {
    struct timespec now;
    real_time(CLOCK_REALTIME, &now);
    return as_ns(&now);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    if (!next_clock_gettime) next_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real_time(clock, time);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        *time = as_timespec(as_ns(time) + offset());
    }
    return result;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

/* The end of the next slice of a wait, by the system's time of day. */
static struct timespec slice_end(const struct timespec *deadline) {
    int64_t real_ns = as_ns(deadline) - offset(), slice_ns = real_now_ns() + SLICE_NS;
    return as_timespec(real_ns < 0 ? 0 : real_ns < slice_ns ? real_ns : slice_ns);
}

static int has_passed(const struct timespec *deadline) { return real_now_ns() + offset() >= as_ns(deadline); }

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    if (deadline->tv_sec < OLDEST_TIME_OF_DAY_S) return next_cond_timedwait(condition, mutex, deadline);
    struct timespec end = slice_end(deadline);
    int result = next_cond_timedwait(condition, mutex, &end);
    return result == ETIMEDOUT && !has_passed(deadline) ? 0 : result; /* it may wake without a reason */
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    for (;;) {
        struct timespec end = slice_end(deadline);
        int result = next_sem_timedwait(semaphore, &end);
        if (result == 0 || errno != ETIMEDOUT || has_passed(deadline)) return result;
    }
}

static long wait_by_time_of_day(long word, long operation, long value, const struct timespec *deadline, long mask) {
    for (;;) {
        struct timespec end = slice_end(deadline);
        long result = next_syscall(SYS_futex, word, operation, value, &end, 0L, mask);
        if (result == 0 || errno != ETIMEDOUT || has_passed(deadline)) return result;
    }
}

long syscall(long number, ...) {
    va_list given;
    va_start(given, number);
    long a = va_arg(given, long), b = va_arg(given, long), c = va_arg(given, long), d = va_arg(given, long);
    long e = va_arg(given, long), f = va_arg(given, long);
    va_end(given);
    if (!next_syscall) next_syscall = dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_futex && (b & FUTEX_CLOCK_REALTIME) && (b & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET && d) {
        return wait_by_time_of_day(a, b, c, (const struct timespec *)d, f);
    }
    if (number == SYS_clock_gettime) return clock_gettime((clockid_t)a, (struct timespec *)b);
    return next_syscall(number, a, b, c, d, e, f);
}
