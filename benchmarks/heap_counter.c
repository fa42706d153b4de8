/* Counts live and peak heap bytes of a process, for honest peaks on a CPU: LD_PRELOAD=./libheap.so python ...
 * Blocks below 32 KiB (Python objects) are left out. Read it with ctypes: heap_live(), heap_peak(), heap_reset().
 * Works with glibc, whose __libc_* functions do the real work. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { SMALLEST = 32768 };
static _Atomic int64_t live, peak;

static void count(void *block, int sign) {
    if (!block) return;
    int64_t size = (int64_t)malloc_usable_size(block);
    if (size < SMALLEST) return;
    int64_t now = atomic_fetch_add(&live, sign * size) + sign * size;
    int64_t highest = atomic_load(&peak);
    while (now > highest && !atomic_compare_exchange_weak(&peak, &highest, now)) {}
}
static void *born(void *block) { count(block, 1); return block; }

void *malloc(size_t size) { return born(__libc_malloc(size)); }
void *calloc(size_t number, size_t size) { return born(__libc_calloc(number, size)); }
void *memalign(size_t alignment, size_t size) { return born(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return born(__libc_memalign(alignment, size)); }
void *valloc(size_t size) { return born(__libc_memalign(4096, size)); }
int posix_memalign(void **out, size_t alignment, size_t size) {
    if (alignment == 0 || alignment % sizeof(void *) || (alignment & (alignment - 1))) return EINVAL;
    void *block = __libc_memalign(alignment, size);
    if (!block) return ENOMEM;
    *out = born(block);
    return 0;
}
void free(void *block) {
    int error = errno;
    count(block, -1);
    __libc_free(block);
    errno = error;
}
void *realloc(void *block, size_t size) {
    /* A block may move while others allocate, so it leaves the count first and comes back as what it became. */
    if (!block) return malloc(size);
    count(block, -1);
    void *moved = __libc_realloc(block, size);
    if (moved) return born(moved);
    if (size) count(block, 1);
    return NULL;
}

int64_t heap_live(void) { return atomic_load(&live); }
int64_t heap_peak(void) { return atomic_load(&peak); }
void heap_reset(void) { atomic_store(&peak, atomic_load(&live)); }
