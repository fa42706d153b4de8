#!/bin/sh
# save_result.sh NAME COMMAND...: runs it and keeps what it printed, with date, machine and command, in benchmarks/results/.
here=$(cd "$(dirname "$0")" && pwd)
name=$1
shift
{
    date -u '+%Y-%m-%d'
    echo "$(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2 | sed 's/^ *//'), $(getconf _NPROCESSORS_ONLN) cores, $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo)"
    echo "\$ $*"
    "$@" 2>/dev/null
    echo "exit code $?"
} >"$here/results/$name.txt"
