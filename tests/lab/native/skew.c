/* Wall-clock shim of the lab, loaded through /etc/ld.so.preload inside a box.
 *
 * Adds the seconds in /etc/clock-skew (ASCII, e.g. "+3600.500000", padded) to CLOCK_REALTIME; CLOCK_MONOTONIC stays.
 * The file is mapped, so a change is seen at once by every program that has the shim. Setting the clock in the box
 * writes the offset there instead: the host's clock is never touched (a box has no CAP_SYS_TIME).
 * Not covered: static programs, file times.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define OFFSET_FILE "/etc/clock-skew"
#define OFFSET_WIDTH 31
#define NANOSECONDS 1000000000LL

typedef int (*get_time)(clockid_t, struct timespec *);

static _Atomic(const char *) mapped;
static atomic_int looked;
static _Atomic(get_time) real_get_time;

static get_time next_get_time(void) {
    get_time found = atomic_load(&real_get_time);
    if (!found) {
        found = (get_time)dlsym(RTLD_NEXT, "clock_gettime");
        atomic_store(&real_get_time, found);
    }
    return found;
}

static const char *offset_text(void) {
    if (!atomic_load(&looked)) {
        int saved = errno, file = open(OFFSET_FILE, O_RDONLY | O_CLOEXEC);
        if (file >= 0) {
            void *area = mmap(NULL, OFFSET_WIDTH, PROT_READ, MAP_SHARED, file, 0);
            if (area != MAP_FAILED) atomic_store(&mapped, area);
            close(file);
        }
        atomic_store(&looked, 1);
        errno = saved;
    }
    return atomic_load(&mapped);
}

/* Read by hand: strtod depends on the locale, and its symbol version on the C library of the host that compiled us. */
static long long offset_nanoseconds(void) {
    const char *text = offset_text();
    long long whole = 0, fraction = 0, scale = NANOSECONDS;
    int sign = 1, i = 0;
    if (!text) return 0;
    if (text[i] == '+' || text[i] == '-') sign = text[i++] == '-' ? -1 : 1;
    for (; i < OFFSET_WIDTH && text[i] >= '0' && text[i] <= '9'; i++) whole = whole * 10 + (text[i] - '0');
    if (i < OFFSET_WIDTH && text[i] == '.')
        for (i++; i < OFFSET_WIDTH && text[i] >= '0' && text[i] <= '9' && scale > 1; i++)
            fraction += (text[i] - '0') * (scale /= 10);
    return sign * (whole * NANOSECONDS + fraction);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = next_get_time()(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        long long shifted = now->tv_sec * NANOSECONDS + now->tv_nsec + offset_nanoseconds();
        now->tv_sec = shifted / NANOSECONDS;
        now->tv_nsec = shifted % NANOSECONDS;
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    int result = clock_gettime(CLOCK_REALTIME, &exact);
    (void)zone;
    if (result == 0) {
        now->tv_sec = exact.tv_sec;
        now->tv_usec = exact.tv_nsec / 1000;
    }
    return result;
}

time_t time(time_t *out) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (out) *out = exact.tv_sec;
    return exact.tv_sec;
}

int clock_settime(clockid_t clock, const struct timespec *wanted) {
    struct timespec real;
    char text[OFFSET_WIDTH + 1];
    long long offset, magnitude;
    int file, written;
    if (clock != CLOCK_REALTIME) {
        errno = EINVAL;
        return -1;
    }
    if (next_get_time()(clock, &real)) return -1;
    offset = (wanted->tv_sec - real.tv_sec) * NANOSECONDS + (wanted->tv_nsec - real.tv_nsec);
    magnitude = offset < 0 ? -offset : offset;
    snprintf(text, sizeof text, "%c%lld.%06lld", offset < 0 ? '-' : '+', magnitude / NANOSECONDS,
             magnitude % NANOSECONDS / 1000);
    memset(text + strlen(text), ' ', OFFSET_WIDTH - strlen(text));
    text[OFFSET_WIDTH - 1] = '\n';
    file = open(OFFSET_FILE, O_WRONLY | O_CLOEXEC);
    if (file < 0) return -1;
    written = pwrite(file, text, OFFSET_WIDTH, 0);
    close(file);
    return written == OFFSET_WIDTH ? 0 : -1;
}

int settimeofday(const struct timeval *wanted, const struct timezone *zone) {
    struct timespec exact;
    (void)zone;
    if (!wanted) return 0; /* only the time zone, which has no meaning here */
    exact.tv_sec = wanted->tv_sec;
    exact.tv_nsec = wanted->tv_usec * 1000;
    return clock_settime(CLOCK_REALTIME, &exact);
}
