#pragma once

// Counters of a streamed model, and how they are shown: JSON for /moe/stats (schema moestream/stats/1, docs/stats.md) and
// Prometheus lines for /metrics. The counters are written by the computing thread and may be read by any other.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moe {

struct layer_stats {
    int32_t layer    = 0; // the block number in the model
    int32_t n_expert = 0;
    int32_t n_slot   = 0;

    // an access is one expert wanted by one batch of tokens, however many of them chose it
    std::atomic<uint64_t> hits         { 0 };
    std::atomic<uint64_t> misses       { 0 };
    std::atomic<uint64_t> evictions    { 0 };
    std::atomic<uint64_t> bytes_needed { 0 }; // of all accesses
    std::atomic<uint64_t> bytes_read   { 0 }; // from files, for this layer, reading ahead included
    std::atomic<uint64_t> bytes_copied { 0 }; // between slots and staging
    std::atomic<uint64_t> stall_us     { 0 }; // time compute waited for experts
    std::atomic<uint64_t> warm_filled  { 0 }; // experts that got a slot before they were asked for
    std::atomic<uint64_t> warm_bytes   { 0 }; // read for those, failed ones included; not in bytes_read
    std::atomic<uint64_t> ram_hits     { 0 }; // of the misses, those that the RAM tier had
    std::atomic<uint64_t> bytes_from_ram { 0 }; // from the RAM tier to slots, staging or the ring
    std::atomic<uint64_t> bytes_to_ram { 0 }; // from slots to the RAM tier
    std::atomic<uint64_t> guesses      { 0 }; // experts that were read because the layer before said that they would be wanted
    std::atomic<uint64_t> guess_hits   { 0 }; // of the misses, those that had been guessed; their bytes are in bytes_read
    std::atomic<uint64_t> guess_wasted_bytes { 0 }; // read for guesses that were wrong; not in bytes_read
    std::atomic<uint64_t> pins         { 0 }; // slots whose expert never leaves; not a counter, but what is now
};

struct memory_report {
    uint64_t pool_bytes    = 0; // all slots
    uint64_t staging_bytes = 0;
    uint64_t ram_bytes     = 0; // slabs of the RAM tier
    uint64_t guess_bytes   = 0; // entries for experts that are guessed
    uint64_t bounce_bytes  = 0; // aligned buffers of direct reads
    uint64_t dense_bytes   = 0; // the weights that stay resident
    uint64_t kv_bytes      = 0;
    uint64_t compute_bytes = 0;
    uint64_t device_bytes  = 0; // of all the above, what is in the memory of devices

    uint64_t total() const { return pool_bytes + staging_bytes + ram_bytes + guess_bytes + bounce_bytes + dense_bytes + kv_bytes + compute_bytes; }
};

// what is in force; fixed after loading, but for memory, which the first context completes
struct stream_report {
    std::string model;          // the file's name, without its folders
    std::string fingerprint;    // of the model, whatever its file is called
    int32_t     n_expert      = 0;
    int32_t     n_expert_used = 0;
    int32_t     n_slot        = 0; // of the layer with the most
    std::string slots_requested;   // as given: a number, "all" or "auto"
    std::string policy;
    std::string map;            // the router map's file name, without its folders; empty: none
    int32_t     map_pin       = 0; // experts a layer that were asked to be pinned
    std::string warm;           // "off", "background", or the seconds that start-up may wait for it
    std::string io_mode;        // "direct" or "buffered"
    std::string io_requested;   // as given
    std::string io_reason;
    std::string io_backend;     // "threads" or "uring"
    int32_t     io_threads    = 0;
    int32_t     io_in_flight  = 0; // reads, by all threads together
    std::string io_probe_note;  // why reads were not measured at start, or not all; empty: they were
    struct probe_figure {
        std::string mode;
        std::string backend;
        int32_t     n_in_flight;
        uint64_t    bytes_per_s;
    };
    std::vector<probe_figure> io_probe;
    bool        overlap       = true;
    std::string staging;        // "full width", "ring of N", "none"
    std::string ram_requested;  // as given: "none", "auto" or bytes; "default": not given, for slots that a device looks after
    std::string prefetch;       // as given: "auto", "on" or "off"
    std::string prefetch_reason; // why nothing is guessed, whatever was asked for; empty: it is possible
    std::string gpu_path;       // who looks after slots on devices: "mailbox" (they themselves), "copy" (the host); empty: there are none
    std::string gpu_path_reason;
    std::string placement;      // where slots are and the expert matmuls run: "cpu", a device, or several, with their layers
    std::string kernels_expert; // "plain", "repacked", or "repacked and plain"
    std::string kernels_dense;
    std::string same_bits_as;   // which stock llama.cpp
    memory_report memory;
};

struct stream_stats {
    std::vector<std::unique_ptr<layer_stats>> layers;

    std::atomic<uint64_t> tokens_decode  { 0 }; // went through slots
    std::atomic<uint64_t> tokens_prefill { 0 }; // went through staging
    std::atomic<uint64_t> read_errors    { 0 };
    std::atomic<bool>     prefetch_on    { false }; // now
};

std::string stats_json(const stream_report & report, const stream_stats & stats);
std::string stats_json_off();
std::string stats_prometheus(const stream_report & report, const stream_stats & stats);

} // namespace moe
