#!/bin/sh
# Builds bench/policies.cpp with the engine's sources and runs it; its head says with what arguments.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$root/build/bench"
"${CXX:-c++}" -O2 -std=c++17 -pthread -I"$root/engine" -o "$root/build/bench/policies" "$root/bench/policies.cpp" \
    "$root/engine/device-tier.cpp" "$root/engine/expert-ring.cpp" "$root/engine/policy.cpp" "$root/engine/ram-tier.cpp" "$root/engine/reader.cpp" "$root/engine/slot-pool.cpp" "$root/engine/stats.cpp" "$root/engine/stream.cpp" \
    "$root/engine/trace.cpp" "$root/engine/trial.cpp" "$root/engine/uring.cpp"
exec "$root/build/bench/policies" "$@"
