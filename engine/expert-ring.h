#pragma once

// A small buffer through which experts pass that a batch needs and no slot has room for: read in the order in which they are computed
// with, each into the entry of the one that every thread is done with. What a run takes is known when it begins; how far each
// thread has come is known from what it takes next.

#include "reader.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace moe {

class expert_ring {
public:
    static constexpr int32_t n_entry_min   = 2; // one is computed with while the next is read
    static constexpr int32_t n_thread_max  = 512;

    // data: n_entry * entry_bytes, n_entry >= n_entry_min; n_item_max: of a run. poison: fill an entry with 0xff before it is read into.
    expert_ring(reader & io, uint8_t * data, uint64_t entry_bytes, int32_t n_entry, size_t n_item_max, bool poison);

    // Starts to read; items are swapped with those of the run before, and have no destination. No thread may be taking.
    void begin(std::vector<transfer> & items) noexcept;

    // Called by each of n_thread threads for all items in their order: sleeps until item i is there. The bytes stay until this thread
    // takes another. A failed item is zeros where its bytes are missing.
    const uint8_t * take(int64_t i, int32_t ith, int32_t n_thread);

    // Sleeps until nothing is on its way; what was not begun is not read. No thread may be taking.
    void end();

    transfer_group & group() { return reads; }

private:
    struct alignas(64) thread_state {
        std::atomic<int64_t> i_item { 0 }; // all before it are done with
    };

    void read_on(int32_t n_thread) noexcept; // under mutex

    reader      & io;
    uint8_t     * const data;
    const uint64_t entry_bytes;
    const int32_t  n_entry;
    const bool     poison;

    std::vector<thread_state> threads;
    std::vector<landing>      landings; // [n_entry]

    std::mutex              mutex;
    std::condition_variable begun;
    std::vector<transfer>   items;
    std::vector<transfer>   scratch;
    int64_t                 n_begun = 0; // guarded by mutex

    transfer_group reads; // last: waits for what points into the others
};

} // namespace moe
