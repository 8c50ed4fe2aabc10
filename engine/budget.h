#pragma once

// How much memory there is, and how many slots it pays for. slots_that_fit() is pure; available_memory() asks the system.

#include <cstdint>
#include <string>

namespace moe {

struct memory_now {
    uint64_t    available_bytes = 0; // 0: unknown; a full group has 1
    std::string limited_by;          // "MemAvailable" or "cgroup " and its path
};

// min(MemAvailable, what every enclosing memory cgroup (v1 or v2) still allows; its file cache counts as free).
// root is put before /proc and /sys, for tests.
memory_now available_memory(const std::string & root = "");

struct slot_budget {
    uint64_t available_bytes; // for everything below
    uint64_t resident_bytes;  // dense weights, KV cache, compute buffers, bounce buffers
    uint64_t staging_bytes;   // needed only when not all experts have a slot
    uint64_t slot_bytes;      // one more slot in every MoE layer
    int32_t  n_expert;        // of the layer with the most
};

// Whether full-width staging takes too much: it does not fit beside slots of so many bytes, or (0: as many as fit) leaves less than three
// quarters of what is there for experts to the slots.
bool staging_is_too_large(const slot_budget & budget, uint64_t slots_bytes);

// the largest number of slots per layer whose total stays within the budget; 0 when not even one fits
int32_t slots_that_fit(const slot_budget & budget);

} // namespace moe
