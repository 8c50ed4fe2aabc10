#pragma once

// The RAM tier below pools that a device looks after by itself (device-pool.h), and the host's side of the mailbox.
//
// Inclusive: an expert in a slot keeps its slab, because the device copies experts in and never out. The slabs are page-locked memory that the
// device reads, allocated once by the caller. With a slab for every expert the device asks for nothing, and no thread looks at the mailbox.
//
// A thread of the tier answers requests while a graph computes, and fills empty slabs while none does (start_warm()). Staging, which the host
// fills, takes experts out of slabs too: hold() and release(), by the computing thread.

#include "device-pool.h"
#include "ram-tier.h"
#include "reader.h"
#include "stats.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace moe {

class device_tier {
public:
    struct part {
        int32_t  file;
        uint64_t offset;       // bytes, of expert 0 in the file
        uint64_t expert_bytes;
    };

    struct layer {
        int32_t           layer; // the block number in the model
        int32_t           n_expert;
        std::vector<part> parts;
        std::vector<int32_t> warm = {}; // experts to read before anybody asks, in this order
    };

    struct options {
        uint8_t        * slabs       = nullptr;
        uint64_t         budget      = 0;       // bytes of slabs, at most
        device_mailbox * box         = nullptr;
        int64_t        * slab_of     = nullptr; // of all layers, one behind the other
        bool             poison      = false;   // fill slabs that are given to another expert with 0xff (tests)
        uint32_t         delay_us    = 0;       // wait up to so long before each answer (tests)
        bool             mute        = false;   // never answer (tests)
    };

    // layers without parts are not the device's. The stats are of all layers. Throws std::system_error when there is no thread.
    device_tier(const options & opt, std::vector<layer> layers, reader & io, stream_stats & stats);
    ~device_tier();

    // bytes that the slabs of a tier with this budget take, and how many experts of the layer they hold at once
    static ram_tier plan(const std::vector<layer> & layers, uint64_t budget);

    uint64_t bytes() const { return slabs.bytes(); }

    // around a graph; end() returns the first error, or ""
    void        compute_begin();
    std::string compute_end();

    // the slab that has the expert, held; -1: none
    int32_t hold(int32_t i_layer, int32_t expert);
    void    release(const std::vector<int32_t> & held);
    const uint8_t * bytes_of(int32_t slab, int32_t i_layer, size_t i_part) const { return opt.slabs + slabs.offset(slab) + offsets[i_layer][i_part]; }

    // where a part begins in a slab of the layer
    uint64_t offset_in_slab(int32_t i_layer, size_t i_part) const { return offsets[i_layer][i_part]; }

    void start_warm();
    bool wait_warm(std::chrono::steady_clock::time_point until); // false: something is left

private:
    struct slab_owner {
        int32_t i_layer = -1;
        int32_t expert  = -1;
    };

    int32_t claim(int32_t i_layer, int32_t expert, bool only_empty);
    void read_into(int32_t slab, int32_t i_layer, int32_t expert, std::vector<transfer> & transfers) const;
    void publish(int32_t i_layer, int32_t expert, int64_t offset);
    void answer();
    bool warm_some();
    void run();
    void note_error(const std::string & what, size_t n_failed);

    const options            opt;
    const std::vector<layer> layers;
    reader                 & io;
    stream_stats           & stats;
    std::vector<size_t>      first_expert;          // [layer] in slab_of
    std::vector<std::vector<uint64_t>> offsets;     // [layer][part]

    std::mutex              mutex; // guards all that follows
    std::condition_variable changed;
    ram_tier                slabs;
    std::vector<slab_owner> owners; // [slab]
    size_t                  n_lacking = 0; // experts without a slab
    bool                    computing = false;
    bool                    stopping  = false;
    bool                    warming   = false;
    size_t                  warm_rank  = 0; // of the next: place in layer::warm, and its layer
    size_t                  warm_layer = 0;
    std::string             error; // of the graph
    transfer_group          group;
    std::vector<transfer>   transfers;
    std::vector<int32_t>    held;
    uint32_t                random = 1;

    std::thread thread; // last
};

} // namespace moe
