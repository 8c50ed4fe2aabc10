#include "expert-ring.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace moe {

expert_ring::expert_ring(reader & io, uint8_t * data, uint64_t entry_bytes, int32_t n_entry, size_t n_item_max, bool poison)
    : io(io), data(data), entry_bytes(entry_bytes), n_entry(n_entry), poison(poison), threads(n_thread_max), landings(std::max(n_entry, 0)) {
    if (n_entry < n_entry_min) {
        fprintf(stderr, "expert_ring: %d entries: at least %d are needed\n", n_entry, n_entry_min);
        abort();
    }
    items.reserve(n_item_max);
    scratch.reserve(n_entry);
}

void expert_ring::begin(std::vector<transfer> & items_in) noexcept {
    std::lock_guard<std::mutex> lock(mutex);
    items.swap(items_in);
    for (thread_state & t : threads) {
        t.i_item.store(0, std::memory_order_relaxed);
    }
    n_begun = 0;
    read_on(1);
}

void expert_ring::read_on(int32_t n_thread) noexcept {
    int64_t i_slowest = INT64_MAX;
    for (int32_t i = 0; i < n_thread; ++i) {
        i_slowest = std::min(i_slowest, threads[i].i_item.load(std::memory_order_acquire));
    }
    const int64_t end = std::min(i_slowest + n_entry, (int64_t) items.size());
    if (n_begun >= end) {
        return;
    }
    if (end - n_begun > n_entry) {
        fprintf(stderr, "expert_ring: item %lld was taken before those in front of it\n", (long long) i_slowest);
        abort();
    }
    scratch.clear();
    for (; n_begun < end; ++n_begun) {
        transfer t = items[n_begun];
        t.dst   = data + n_begun % n_entry * entry_bytes;
        t.lands = &landings[n_begun % n_entry];
        if (poison) {
            memset(t.dst, 0xff, entry_bytes);
        }
        scratch.push_back(t);
    }
    io.submit(reads, scratch, urgency::demand);
    begun.notify_all();
}

const uint8_t * expert_ring::take(int64_t i, int32_t ith, int32_t n_thread) {
    threads[ith].i_item.store(i, std::memory_order_release);
    {
        std::unique_lock<std::mutex> lock(mutex);
        read_on(n_thread);
        // the slowest thread finds its own item begun, and begins those of the others as it goes on
        begun.wait(lock, [&] { return n_begun > i; });
    }
    const landing & bytes = landings[i % n_entry];
    if (!bytes.is_here()) {
        reads.wait(bytes);
    }
    return data + i % n_entry * entry_bytes;
}

void expert_ring::end() {
    reads.wait();
    std::lock_guard<std::mutex> lock(mutex);
    items.clear();
    n_begun = 0;
}

} // namespace moe
