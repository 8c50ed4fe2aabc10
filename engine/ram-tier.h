#pragma once

// The level of memory below the slots: experts that lost their slot, of all layers together. An expert is in a slot or in a slab, not in
// both: with a model of E experts, S slots and R slabs, only E - S - R experts are on the disk alone.
//
// This is the bookkeeping: which expert is in which slab of one buffer, and who gives way (the one that lost its slot longest ago).
// Layers whose experts have the same size share slabs; each size has its part of the buffer, cut once. Moves no bytes.
//
// A slab that a transfer reads or writes is held, however often; it is not given to another expert before it is released. Who holds a
// slab is its user. Not for two threads at a time; memory is allocated in the constructor only.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moe {

class ram_tier {
public:
    struct layer_size {
        uint64_t expert_bytes;
        int32_t  n_expert;
        int32_t  n_slot;
    };

    // budget: bytes, not exceeded; what no expert could need is not taken either
    ram_tier(const std::vector<layer_size> & layers, uint64_t budget);

    uint64_t bytes()  const { return total_bytes; } // of the buffer
    int32_t  n_slab() const { return (int32_t) slabs.size(); }

    // where in the buffer a slab begins; a multiple of alignment
    static constexpr uint64_t alignment = 64;
    // what a part of an expert takes in a slab: each is aligned
    static constexpr uint64_t aligned(uint64_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }
    uint64_t offset(int32_t slab) const { return slabs[slab].offset; }

    // the slab that holds the expert, or will; else -1
    int32_t find(int32_t i_layer, int32_t expert) const { return slab_of[first_expert[i_layer] + expert]; }

    // A slab for an expert that has none, held: an empty one, else that of the expert that came first of those that nobody holds. -1 when
    // there is neither. only_empty: nobody gives way.
    int32_t claim(int32_t i_layer, int32_t expert, bool only_empty = false);

    // the slab's expert gives its place to another of the same layer, which has no slab and counts as new
    void exchange(int32_t slab, int32_t expert);

    // the expert of the slab was wanted: it counts as new
    void touch(int32_t slab);

    // slabs that the layer shares with those whose experts have the same size
    int32_t n_slab_for(int32_t i_layer) const;

    void hold(int32_t slab)    { slabs[slab].n_held++; }
    void release(int32_t slab);
    int32_t n_held(int32_t slab) const { return slabs[slab].n_held; }

    // the slab's bytes are not to be found any more: they moved, or are not to be trusted
    void forget(int32_t slab);

    // abort() with a message when an invariant is broken
    void self_check() const;

private:
    struct slab_state {
        uint64_t offset;
        int32_t  i_class;
        int32_t  i_layer = -1;
        int32_t  expert  = -1; // -1: empty
        int32_t  n_held  = 0;
        int32_t  older   = -1; // of the class, among those with an expert
        int32_t  newer   = -1;
    };

    // experts of one size
    struct size_class {
        uint64_t slab_bytes = 0;
        uint64_t wanted = 0; // slabs that could be of use
        int32_t  oldest = -1;
        int32_t  newest = -1;
        std::vector<int32_t> empty; // and not held
    };

    void link(int32_t slab);
    void unlink(int32_t slab);
    void set(int32_t slab, int32_t i_layer, int32_t expert);

    std::vector<size_class> classes;
    std::vector<int32_t>    class_of;     // [layer]
    std::vector<size_t>     first_expert; // [layer]
    std::vector<int32_t>    slab_of;      // [first_expert + expert], -1: none
    std::vector<slab_state> slabs;
    uint64_t                total_bytes = 0;
};

} // namespace moe
