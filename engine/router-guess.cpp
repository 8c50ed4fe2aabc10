#include "router-guess.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moe {

static constexpr int64_t n_chunk = 256; // values of a row at a time; the largest block of any type

router_guess::router_guess(std::vector<router_weights> routers_in, uint32_t noise) : routers(std::move(routers_in)), noise(noise) {
    size_t n_expert_max = 0;
    for (router_weights & r : routers) {
        if (n_chunk % r.block_size != 0 || r.n_embd % r.block_size != 0) {
            r.rows = nullptr;
        }
        n_expert_max = std::max(n_expert_max, (size_t) r.n_expert);
    }
    scores.resize(n_tokens_max * n_expert_max);
    order.resize(n_tokens_max * n_expert_max);
    found.reserve(n_expert_max);
    seen.resize(n_expert_max);
}

// eight sums, so that a compiler may use wide registers
static float dot(const float * a, const float * b, int64_t n) {
    float sums[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int k = 0; k < 8; ++k) {
            sums[k] += a[i + k] * b[i + k];
        }
    }
    float sum = 0;
    for (; i < n; ++i) {
        sum += a[i] * b[i];
    }
    for (const float s : sums) {
        sum += s;
    }
    return sum;
}

static float dot_of_row(const router_weights & r, int32_t expert, const float * state) {
    const uint8_t * row = r.rows + expert * r.row_bytes;
    if (!r.to_float) {
        return dot((const float *) row, state, r.n_embd);
    }
    float sum = 0;
    float values[n_chunk];
    for (int64_t i = 0; i < r.n_embd; i += n_chunk) {
        const int64_t n = std::min(n_chunk, r.n_embd - i);
        r.to_float(row + i / r.block_size * r.block_bytes, values, n);
        sum += dot(values, state + i, n);
    }
    return sum;
}

bool router_guess::score(int32_t i_layer, const float * state, uint64_t stride, int64_t n_tokens, int32_t ith, int32_t n_thread) {
    const router_weights & r = routers[i_layer];
    const int32_t n     = (int32_t) std::min<int64_t>(n_tokens, n_tokens_max);
    const int64_t first = n_tokens - n;
    const int32_t begin = (int32_t) ((int64_t) r.n_expert *  ith      / n_thread);
    const int32_t end   = (int32_t) ((int64_t) r.n_expert * (ith + 1) / n_thread);
    for (int32_t e = begin; e < end; ++e) {
        for (int32_t t = 0; t < n; ++t) {
            float s = dot_of_row(r, e, (const float *) ((const uint8_t *) state + (first + t) * stride));
            s += r.bias ? r.bias[e] : 0.0f;
            scores[t * r.n_expert + e] = r.choice_bias ? 1.0f / (1.0f + std::exp(-s)) + r.choice_bias[e] : s;
        }
    }
    if (n_done.fetch_add(1, std::memory_order_acq_rel) + 1 < n_thread) {
        return false;
    }
    n_done.store(0, std::memory_order_relaxed);
    choose(r, n);
    return true;
}

void router_guess::choose(const router_weights & r, int32_t n_tokens) {
    for (int32_t t = 0; t < n_tokens; ++t) {
        const float * s = &scores[t * r.n_expert];
        const auto    o = order.begin() + t * r.n_expert;
        std::iota(o, o + r.n_expert, 0);
        // NaN is less than everything, so that the order is one
        const auto value = [s](int32_t e) { return std::isnan(s[e]) ? -INFINITY : s[e]; };
        std::partial_sort(o, o + std::min(r.n_used, r.n_expert), o + r.n_expert, [&](int32_t a, int32_t b) { return value(a) > value(b); });
    }
    found.clear();
    std::fill(seen.begin(), seen.end(), 0);
    for (int32_t k = 0; k < std::min(r.n_used, r.n_expert); ++k) {
        for (int32_t t = 0; t < n_tokens; ++t) {
            int32_t e = order[t * r.n_expert + k];
            if (noise > 0) { // xorshift (Marsaglia)
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                e = (random >> 40) % 100 < noise ? (int32_t) ((random >> 8) % (uint64_t) r.n_expert) : e;
            }
            if (!seen[e]) {
                seen[e] = 1;
                found.push_back(e);
            }
        }
    }
}

} // namespace moe
