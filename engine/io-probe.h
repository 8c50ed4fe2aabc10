#pragma once

// What the drive does with reads of experts, and the way of reading that follows from it. probe_io() measures, at start and in a fraction
// of a second; choose_io() is pure.
//
// Measured are reads as the reader makes them (random experts of the model's own file, its request size), with different numbers under
// way. The bytes are thrown away. What is read through the page cache was not in it before, so that the drive is measured and not memory,
// and is put out of it again.

#include "reader.h"

#include <cstdint>
#include <string>
#include <vector>

namespace moe {

// one tensor of experts, one behind the other
struct probe_place {
    int32_t  file;
    uint64_t offset;       // bytes
    uint64_t expert_bytes;
    int32_t  n_expert;
};

struct probe_plan {
    uint64_t request_bytes = reader::default_chunk_size; // the most that is asked for at once
    bool     buffered      = true;  // beside direct reads
    bool     threads       = true;  // else uring alone
    bool     uring         = false;
    std::vector<int32_t> in_flight = { 1, 2, 4, 8 };
    double   limit_s       = 0.3;   // of all; one read of each worker may take longer than that
    uint64_t seed          = 0;     // other seeds read other experts
};

struct probe_rate {
    io_mode    mode;
    io_backend backend;
    int32_t    n_in_flight;
    uint64_t   bytes_per_s;
};

struct probe_result {
    std::vector<probe_rate> rates;
    std::string             note;          // why no more was measured; empty: everything was
    std::string             direct_refusal; // why the file system does not read directly; empty: it does, or was not asked
};

// Never throws: what cannot be measured is missing, and note says why.
probe_result probe_io(const std::vector<open_file> & files, const std::vector<probe_place> & places, const probe_plan & plan) noexcept;

// below this many bytes of experts nothing is measured: they are there before it matters
constexpr uint64_t probe_bytes_min = 64ull << 20;

struct io_wish {
    io_mode    mode        = io_mode::automatic;
    io_backend backend     = io_backend::automatic;
    int32_t    n_in_flight = 0; // 0: automatic
};

// What automatic choices are when nothing was measured, and how much better (in percent) another must be to take their place. Buffered
// reads displace what memory is short of, and with fewer reads under way copies and conversions, which are not measured, hold them up:
// those must be much better.
constexpr int32_t default_in_flight   = 4;
constexpr int32_t min_in_flight       = 2;
constexpr int32_t max_in_flight       = 8;
constexpr int32_t better_percent      = 15;
constexpr int32_t much_better_percent = 50;

struct io_choice {
    io_mode     mode;
    io_backend  backend;
    int32_t     n_in_flight;
    std::string measured; // the best of each mode, in words; empty when nothing was measured
    bool        buffered_is_faster = false; // and was therefore chosen
};

// fits: the page cache can hold all experts beside everything else
io_choice choose_io(const io_wish & wish, bool fits, const probe_result & probe);

// n reads under way by how many workers: one each, or several to a worker that has a ring. Returns the workers' number, a divisor of n.
int32_t n_workers(io_backend backend, int32_t n_in_flight, int32_t n_cores);

} // namespace moe
