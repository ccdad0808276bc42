/* Runs a compiled kernel on arguments from a file: runtime/launch.py in C, for a machine that has no Python.

   driver JOB RESULT
   JOB     i64 words, buffers, bytes of scratch a thread, threads; the words; then for each buffer i64 word, bytes, and the bytes.
           A word that stands for a buffer is set to its address.
   RESULT  i64 tasks, shared bytes, zero bytes, flops, fault; then the bytes of all buffers.

   Each buffer ends where a page begins that must not be touched. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void kernel_plan(const int64_t *args, int64_t *result) __asm__(KERNEL ".plan");
void kernel_work(int64_t *context) __asm__(KERNEL ".work");

static void *work(void *context) {
    kernel_work(context);
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
    int64_t sizes[4], result[5] = {0};
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
    kernel_plan(args, result);
    char *shared = NULL, *scratch = NULL;
    if (posix_memalign((void **)&shared, 64, result[1] + 64) || posix_memalign((void **)&scratch, 64, sizes[2] * sizes[3] + 64))
        return 5;
    memset(shared, 0x7f, result[1]);
    memset(shared, 0, result[2]);
    memset(scratch, 0x7f, sizes[2] * sizes[3]);
    int64_t context[8] = {(int64_t)args, (int64_t)shared, (int64_t)scratch, sizes[2], 0, 0, result[0], 0};
    pthread_t team[16];
    int64_t threads = sizes[3] < 16 ? sizes[3] : 16;
    for (int64_t n = 0; n < threads; n++)
        if (pthread_create(&team[n], NULL, work, context)) return 6;
    for (int64_t n = 0; n < threads; n++) pthread_join(team[n], NULL);
    result[4] = context[7];
    fwrite(result, sizeof result, 1, out);
    for (int64_t n = 0; n < sizes[1]; n++) fwrite(buffers[n], 1, bytes[n], out);
    return fclose(out) ? 7 : 0;
}
