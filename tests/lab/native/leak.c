/* A real leak of the lab, loaded through /etc/ld.so.preload inside a box: only the stage's process gets it.
 *
 * Maps and touches the bytes a second that /etc/leak-rate says (ASCII, looked at ten times a second), and never gives
 * them back. A stage that starts anew starts without what an earlier one has leaked.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define RATE_FILE "/etc/leak-rate"
#define PROGRAM "stage_runtime"
#define LOOKS_A_SECOND 10

static double bytes_a_second(void) {
    double rate = 0;
    FILE *file = fopen(RATE_FILE, "r");
    if (!file) return 0;
    if (fscanf(file, "%lf", &rate) != 1) rate = 0;
    fclose(file);
    return rate;
}

static void *leak(void *nothing) {
    const struct timespec pause = {.tv_nsec = 1000000000L / LOOKS_A_SECOND};
    const double page = (double)sysconf(_SC_PAGESIZE);
    double owed = 0;
    for (;; nanosleep(&pause, NULL)) {
        owed += bytes_a_second() / LOOKS_A_SECOND;
        size_t bytes = (size_t)(owed / page) * (size_t)page;
        if (bytes == 0) continue;
        char *block = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (block != MAP_FAILED) memset(block, 1, bytes);
        owed -= (double)bytes;
    }
    return nothing;
}

__attribute__((constructor)) static void begin(void) {
    char words[4096];
    int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    ssize_t size = read(file, words, sizeof words);
    close(file);
    if (size <= 0 || !memmem(words, (size_t)size, "\0" PROGRAM, sizeof "\0" PROGRAM)) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the thread takes no signal that is meant for the program */
    pthread_t thread;
    if (pthread_create(&thread, NULL, leak, NULL) == 0) pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}
