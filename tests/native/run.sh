#!/bin/sh
# Builds and runs the native tests.  usage: tests/native/run.sh [plain|asan|tsan|all]   (default: all)
#                                           tests/native/run.sh fuzz SECONDS [plain|asan|tsan|all]
# fuzz: every fuzzer for SECONDS in each build, from a random seed that is printed; SEED=N sets it.
# Build folders: build/native, build/native-asan, build/native-tsan. Ends non-zero on the first failure.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
jobs=${JOBS:-$(nproc)}

usage() {
    echo "usage: $0 [plain|asan|tsan|all] | fuzz SECONDS [plain|asan|tsan|all]" >&2
    exit 2
}

run() { # build folder, sanitizers
    echo "== $1"
    cmake -S "$root/tests/native" -B "$root/build/$1" -DMOE_SANITIZE="$2" >/dev/null
    cmake --build "$root/build/$1" -j "$jobs"
    if [ -z "$seconds" ]; then
        (cd "$root/build/$1" && ctest --output-on-failure --no-tests=error -j "$jobs")
        return
    fi
    for fuzzer in fuzz-slot-pool fuzz-reader fuzz-stream; do
        seed=${SEED:-$(od -An -N6 -tu8 /dev/urandom | tr -d ' ')}
        echo "-- build/$1/$fuzzer $seed $seconds"
        "$root/build/$1/$fuzzer" "$seed" "$seconds"
    done
}

export ASAN_OPTIONS="${ASAN_OPTIONS:-detect_stack_use_after_return=1:strict_string_checks=1}"
export UBSAN_OPTIONS="${UBSAN_OPTIONS:-print_stacktrace=1}"
export TSAN_OPTIONS="${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1}"

seconds=
if [ "${1:-}" = fuzz ]; then
    seconds=${2:-}
    case "$seconds" in ''|*[!0-9]*) usage ;; esac
    shift 2
fi

case "${1:-all}" in
    plain) run native "" ;;
    asan)  run native-asan address,undefined ;;
    tsan)  run native-tsan thread ;;
    all)
        run native ""
        run native-asan address,undefined
        run native-tsan thread
        ;;
    *) usage ;;
esac
