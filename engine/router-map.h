#pragma once

// Router maps: how often each expert of a model was chosen, counted beforehand. The format is described in docs/traces.md.

#include <cstdint>
#include <string>
#include <vector>

namespace moe {

struct map_layer {
    int32_t               layer;      // the block number in the model
    std::vector<uint64_t> counts;     // [n_expert]
    int32_t               n_slot = 0; // 0: the map does not say

    // all experts, the most used first, equals by number
    std::vector<int32_t> by_use() const;
};

struct router_map {
    std::string            fingerprint; // of the model it belongs to
    std::string            model_name;  // the file that it was made from; for messages
    bool                   has_slots = false;
    std::vector<map_layer> layers;      // by block number

    const map_layer * find(int32_t layer) const;
};

// Throws std::runtime_error: "PATH: what is wrong; hint: ...". What it returns is consistent in itself, whatever is in the file.
router_map read_router_map(const std::string & path);

} // namespace moe
