#pragma once

// What the next MoE layer's router will probably choose: its weights on the hidden state that this layer's router sees. Between the two lie
// this layer's experts and the next attention, which add to that state more than they change it, so that most of the guesses are right
// (docs/measuring.md). Nothing that is computed depends on them.
//
// After A. Eliseev, D. Mazur, Fast inference of mixture-of-experts language models with offloading (2023), section 3.2.

#include <atomic>
#include <cstdint>
#include <vector>

namespace moe {

// a router as its weights lie in memory
struct router_weights {
    const uint8_t * rows = nullptr;   // null: unknown, nothing is guessed
    uint64_t        row_bytes = 0;
    int64_t         n_embd    = 0;
    int32_t         n_expert  = 0;
    int32_t         n_used    = 0;
    // n floats of a row, of a whole number of blocks; null: the rows are floats
    void         (* to_float)(const void * src, float * dst, int64_t n) = nullptr;
    int64_t         block_size  = 1;  // values
    uint64_t        block_bytes = 4;
    const float   * bias        = nullptr; // [n_expert] of the logits
    const float   * choice_bias = nullptr; // [n_expert] of the probabilities that are compared: a sigmoid's
};

class router_guess {
public:
    static constexpr int32_t n_tokens_max = 8; // of a wider batch, the last

    // noise: percent of the guesses that are replaced by any expert, to see what wrong ones cost
    explicit router_guess(std::vector<router_weights> routers, uint32_t noise = 0);

    bool knows(int32_t i_layer) const { return i_layer >= 0 && i_layer < (int32_t) routers.size() && routers[i_layer].rows; }

    int64_t n_embd(int32_t i_layer) const { return routers[i_layer].n_embd; }

    // All n_thread threads call it for the same layer, each scores its share; for the last to come it is true, and best() is what the
    // others found. state: of n_tokens, stride in bytes.
    bool score(int32_t i_layer, const float * state, uint64_t stride, int64_t n_tokens, int32_t ith, int32_t n_thread);

    // each expert once, the likeliest first: every token's first, every token's second, and so on
    const std::vector<int32_t> & best() const { return found; }

private:
    void choose(const router_weights & r, int32_t n_tokens);

    std::vector<router_weights> routers;
    const uint32_t              noise;
    uint64_t                    random = 0x9e3779b97f4a7c15u;
    std::vector<float>          scores; // [token][expert]
    std::vector<int32_t>        order;  // [token][expert]
    std::vector<int32_t>        found;
    std::vector<uint8_t>        seen;   // [expert]
    std::atomic<int32_t>        n_done { 0 };
};

} // namespace moe
