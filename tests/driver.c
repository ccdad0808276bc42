/* Runs a compiled kernel on arguments from a file: runtime/launch.py in C, for a machine that has no Python.

   driver JOB RESULT
   JOB     i64 words, buffers, threads; the words; then for each buffer i64 word, bytes, and the bytes.
           A word that stands for a buffer is set to its address.
   RESULT  i64 fault; then the bytes of all buffers.

   KERNELS is a list of K(number, "name", bytes of scratch a thread): the kernels of the program, which run one after the other.
   Each buffer ends where a page begins that must not be touched. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define K(n, name, bytes) \
    void plan##n(const int64_t *args, int64_t *result) __asm__(name ".plan"); \
    void work##n(int64_t *context) __asm__(name ".work");
KERNELS
#undef K
#define K(n, name, bytes) {plan##n, work##n, bytes},
static const struct {
    void (*plan)(const int64_t *, int64_t *);
    void (*work)(int64_t *);
    int64_t thread_bytes;
} kernels[] = {KERNELS};

struct call {
    void (*work)(int64_t *);
    int64_t context[8];
};

static void *work(void *call) {
    ((struct call *)call)->work(((struct call *)call)->context);
    return NULL;
}

static char *guarded(size_t bytes) {
    size_t page = sysconf(_SC_PAGESIZE), pages = (bytes + page - 1) / page * page;
    char *room = mmap(NULL, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED || mprotect(room + pages, page, PROT_NONE)) exit(3);
    return room + pages - bytes;
}

static void get(void *to, size_t bytes, FILE *file) {
    if (bytes && fread(to, bytes, 1, file) != 1) exit(4);
}

int main(int count, char **names) {
    if (count != 3) return 2;
    FILE *job = fopen(names[1], "rb"), *out = fopen(names[2], "wb");
    if (!job || !out) return 2;
    int64_t sizes[3], fault = 0;
    get(sizes, sizeof sizes, job);
    int64_t *args = calloc(sizes[0] + 1, 8), *bytes = calloc(sizes[1] + 1, 8);
    char **buffers = calloc(sizes[1] + 1, sizeof *buffers);
    get(args, 8 * sizes[0], job);
    for (int64_t n = 0; n < sizes[1]; n++) {
        int64_t place[2];
        get(place, sizeof place, job);
        bytes[n] = place[1];
        buffers[n] = guarded(place[1]);
        args[place[0]] = (int64_t)buffers[n];
        get(buffers[n], place[1], job);
    }
    int64_t threads = sizes[2] < 16 ? sizes[2] : 16;
    for (size_t k = 0; k < sizeof kernels / sizeof *kernels && !fault; k++) {
        int64_t plan[4], thread_bytes = (kernels[k].thread_bytes + 63) / 64 * 64;
        kernels[k].plan(args, plan);
        char *shared = NULL, *scratch = NULL;
        if (posix_memalign((void **)&shared, 64, plan[1] + 64) || posix_memalign((void **)&scratch, 64, thread_bytes * threads + 64))
            return 5;
        memset(shared, 0x7f, plan[1]);
        memset(shared, 0, plan[2]);
        memset(scratch, 0x7f, thread_bytes * threads);
        struct call call = {kernels[k].work, {(int64_t)args, (int64_t)shared, (int64_t)scratch, thread_bytes, 0, 0, plan[0], 0}};
        pthread_t team[16];
        for (int64_t n = 0; n < threads; n++)
            if (pthread_create(&team[n], NULL, work, &call)) return 6;
        for (int64_t n = 0; n < threads; n++) pthread_join(team[n], NULL);
        fault = call.context[7];
    }
    fwrite(&fault, sizeof fault, 1, out);
    for (int64_t n = 0; n < sizes[1]; n++) fwrite(buffers[n], 1, bytes[n], out);
    return fclose(out) ? 7 : 0;
}
