#!/bin/sh
# fair.sh COMMAND...: runs it on one thread, with the heap counter, and with a malloc that keeps freed pages.
# Without the last, page faults of glibc make recomputation look cheaper than it is.
here=$(cd "$(dirname "$0")" && pwd)
build="$here/../build"
mkdir -p "$build"
[ "$build/libheap.so" -nt "$here/heap_counter.c" ] ||
    gcc -O2 -shared -fPIC -o "$build/libheap.so" "$here/heap_counter.c" || exit 1
export LD_PRELOAD="$build/libheap.so" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=67108864
exec "$@"
