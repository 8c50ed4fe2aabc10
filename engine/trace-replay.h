#pragma once

// What the slots of a layer would have done with a recorded trace: the engine's own pool and policies (slot-pool.h, policy.h), driven as
// stream.cpp drives them. With the slots and the policy of the recording the counts are those of docs/stats.md, unless a read failed or a
// graph was aborted.

#include "policy.h"
#include "trace.h"

#include <cstdint>
#include <string>
#include <vector>

namespace moe {

// one layer's records, in order
struct layer_trace {
    struct batch {
        int32_t  n_used;
        uint32_t n_tokens;
        uint64_t first_id;       // index into ids
        uint64_t first_distinct; // index into distinct; the batch's end is the next one's begin
    };

    int32_t layer;
    int32_t n_expert;
    std::vector<batch>    batches;
    std::vector<uint16_t> ids;      // of all batches, token after token
    std::vector<uint16_t> distinct; // of each batch, in order of first appearance

    void add(int32_t n_used, uint32_t n_tokens, const std::vector<uint16_t> & batch_ids);

    uint64_t n_distinct(size_t i) const {
        return (i + 1 < batches.size() ? batches[i + 1].first_distinct : distinct.size()) - batches[i].first_distinct;
    }
};

struct trace_contents {
    std::vector<layer_trace> layers;
    uint64_t n_records = 0;
    bool     truncated = false; // the last record was cut short, and is left out
};

// The records behind a header whose layers these are. Throws std::runtime_error for a layer, or an expert, that there is not, an expert twice for a token.
trace_contents parse_records(const uint8_t * data, uint64_t size, const std::vector<trace_layer> & layers);

struct replay_counts {
    uint64_t hits          = 0;
    uint64_t misses        = 0;
    uint64_t evictions     = 0;
    uint64_t misses_decode = 0; // of batches that went through slots
    uint64_t tokens_decode  = 0;
    uint64_t tokens_prefill = 0; // through staging

    void add(const replay_counts & o);
};

// n_slot: 1 to n_expert
replay_counts replay(const layer_trace & trace, policy_kind kind, int32_t n_slot);

// The fewest misses there can be under the same rules (which experts are in slots together, what a prompt leaves there): evicts the expert
// that is used furthest in the future. Belady, A study of replacement algorithms for a virtual-storage computer (1966).
replay_counts replay_optimum(const layer_trace & trace, int32_t n_slot);

std::vector<policy_kind> all_policies();

} // namespace moe
