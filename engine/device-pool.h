#pragma once

// A pool in a device's memory that the device looks after by itself: what its kernels (moe-cuda.cu) and the host (device-tier.h) both know.
// Plain data; no ggml, no CUDA.
//
// A node in the graph, computed on the device, turns the experts that a batch chose into slot ids. It finds them in a table in the device's
// memory. For one that has no slot it takes the slot that was used longest ago and copies the expert there itself, out of a slab of the RAM
// tier: page-locked memory of the host that the device reads. So nothing is asked of the host and the stream is never synchronised, and
// because the copy is part of the graph, no kernel before it can still read the slot and none behind it can come too early.
//
// Only an expert that has no slab needs the host: the node writes what is missing into a mailbox and waits, and a thread of the host
// reads the experts into slabs and answers. A host that does not answer in time is an error of the graph, not a hang.
//
// Another node, in the layer before, scores the layer's router on what is known by then and fetches the likeliest experts in a stream of its own,
// while the layer before computes: from slabs only, into the slots that would give way next, where they stay the next to give way until they
// are used. The first node waits for that. Fetches ahead follow one another, so that the link is never idle between them, and stop while
// something is copied that a node waits for.
//
// Who writes what: the device all of its tables, the first part of the mailbox and, at most once until the host has taken it, an error; the
// host the rest of the mailbox and slab_of. The host takes a slab from an expert only while the device waits for an answer, or while no graph
// computes: at any other time a copy from it might be under way. So before it asks, the device waits for the end of what is being fetched
// ahead, and until it has its answer begins no other.

#include <cstdint>

namespace moe {

constexpr int32_t device_max_parts = 4;
constexpr int32_t device_max_rows  = 1024; // experts, and slots, of a layer
constexpr int32_t device_max_ids   = 256; // that one node can map; also the most experts that it can ask for

enum device_error : int32_t {
    device_error_none   = 0,
    device_error_range  = 1, // the router chose an expert that there is not
    device_error_twice  = 2, // or one expert twice for a token
    device_error_silent = 3, // the host did not answer
    device_error_bytes  = 4, // a slot does not hold what the expert's slab holds (tests)
};

// in memory that both see
struct device_mailbox {
    // the device's: a request is complete when asked has changed
    uint32_t asked;
    int32_t  i_layer;
    int32_t  n_expert;
    int32_t  experts[device_max_ids];

    int32_t  error; // device_error
    int32_t  error_layer;
    int32_t  error_expert;
    int32_t  error_token;

    // the host's: the request that was answered last. An expert that has no slab then could not be read.
    alignas(128) uint32_t answered;
};

// in the device's memory, of all layers
struct device_control {
    int32_t dry;    // the host's, between graphs: ids of any slots, nothing is looked up
    int32_t silent; // the host did not answer in the graph that computes: it is not asked again. Cleared by the host between graphs.
    int32_t guessing; // the host's, between graphs: experts are fetched ahead

    // 0 between graphs; the host sees to it when one has failed
    int32_t  failed;   // there is an error in the mailbox
    uint32_t asking;   // a node waits for the host, or did in vain: nothing may be fetched ahead
    uint32_t fetching; // layers for which experts are being fetched ahead
    uint32_t copying;  // nodes that copy what is missing: what is fetched ahead waits
};

// in the device's memory, of one layer
struct device_layer_state {
    uint64_t hits;
    uint64_t misses;
    uint64_t evictions;
    uint64_t asked;     // experts that had no slab
    uint64_t tokens;
    uint64_t guesses;    // experts fetched ahead
    uint64_t guess_hits; // and used; in hits

    uint32_t clock;     // of last_use
    uint32_t ready;     // what follows is complete: all blocks may copy
    uint32_t n_done;    // blocks that have
    int32_t  is_silent; // this node found out
    uint32_t n_scored;    // blocks that have scored their part of the router
    uint32_t guess_ready; // what follows is what was guessed, to be copied
    int32_t  n_copy;
    int32_t  slot  [device_max_ids];
    int32_t  expert[device_max_ids];
    int64_t  slab  [device_max_ids]; // bytes from slabs; -1: the expert could not be read
};

constexpr int32_t device_guess_tokens = 8; // that experts are guessed for

// of the weights of a router
enum device_type : int32_t { device_f32, device_f16, device_bf16 };

constexpr uint32_t device_never = UINT32_MAX; // last_use of a slot whose expert stays

struct device_part {
    uint8_t * slots;
    uint64_t  bytes;   // of one expert
    uint64_t  in_slab; // where it begins there
};

// what the kernels of a layer are started with
struct device_layer {
    int32_t     i_layer;
    int32_t     n_expert;
    int32_t     n_slot;
    int32_t     n_part;
    device_part parts[device_max_parts];
    int32_t     unit;       // bytes that can be copied at a time: divides all sizes and addresses; 16, 4 or 1
    int32_t     checks;     // tests: compare what is used with its slab
    uint64_t    timeout_ns;
    int32_t     n_used;     // of a token

    // in the device's memory
    int32_t            * slot_of;   // [n_expert], -1: none
    int32_t            * expert_of; // [n_slot], -1: none
    uint32_t           * last_use;  // [n_slot]
    const uint8_t      * stays;     // [n_expert] 1: once in a slot, it stays
    uint8_t            * is_guess;  // [n_slot] 1: fetched ahead, and not used yet
    float              * scores;    // [device_guess_tokens * n_expert]
    const float        * router_bias; // [n_expert] or null; likewise for the choice alone, behind a sigmoid
    const float        * choice_bias;
    device_layer_state * state;
    device_control     * control;

    // in memory that both see
    const int64_t  * slab_of; // [n_expert] bytes from slabs, -1: none
    const uint8_t  * slabs;
    device_mailbox * box;

    // the host's: the stream in which experts are fetched ahead, and its events; made by the device's code when first needed
    void * guess_stream;
    void * forked;
    void * joined;
};

} // namespace moe
