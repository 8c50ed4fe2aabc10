#!/bin/sh
# Builds and runs the native tests.  usage: tests/native/run.sh [plain|asan|tsan|all]   (default: all)
# Build folders: build/native, build/native-asan, build/native-tsan. Ends non-zero on the first failure.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
jobs=${JOBS:-$(nproc)}

run() { # build folder, sanitizers
    echo "== $1"
    cmake -S "$root/tests/native" -B "$root/build/$1" -DMOE_SANITIZE="$2" >/dev/null
    cmake --build "$root/build/$1" -j "$jobs"
    (cd "$root/build/$1" && ctest --output-on-failure --no-tests=error -j "$jobs")
}

export ASAN_OPTIONS="${ASAN_OPTIONS:-detect_stack_use_after_return=1:strict_string_checks=1}"
export UBSAN_OPTIONS="${UBSAN_OPTIONS:-print_stacktrace=1}"
export TSAN_OPTIONS="${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1}"

case "${1:-all}" in
    plain) run native "" ;;
    asan)  run native-asan address,undefined ;;
    tsan)  run native-tsan thread ;;
    all)
        run native ""
        run native-asan address,undefined
        run native-tsan thread
        ;;
    *)
        echo "usage: $0 [plain|asan|tsan|all]" >&2
        exit 2
        ;;
esac
