#include "trace-replay.h"

#include "slot-pool.h"
#include "stream.h"

#include <algorithm>
#include <stdexcept>

namespace moe {

std::vector<policy_kind> all_policies() {
    std::vector<policy_kind> kinds;
    for (policy_kind kind = policy_kind::lru; ; ) {
        kinds.push_back(kind);
        switch (kind) { // no default: the compiler names the policy that is missing
            case policy_kind::lru:  kind = policy_kind::lfu;  break;
            case policy_kind::lfu:  kind = policy_kind::heat; break;
            case policy_kind::heat: return kinds;
        }
    }
}

void layer_trace::add(int32_t n_used, uint32_t n_tokens, const std::vector<uint16_t> & batch_ids) {
    batches.push_back({ n_used, n_tokens, ids.size(), distinct.size() });
    ids.insert(ids.end(), batch_ids.begin(), batch_ids.end());
    std::vector<bool> seen(n_expert, false);
    for (const uint16_t e : batch_ids) {
        if (!seen[e]) {
            seen[e] = true;
            distinct.push_back(e);
        }
    }
}

static uint32_t little_endian(const uint8_t * p, uint64_t n_bytes) {
    uint32_t v = 0;
    for (uint64_t i = 0; i < n_bytes; ++i) {
        v |= (uint32_t) p[i] << (8 * i);
    }
    return v;
}

trace_contents parse_records(const uint8_t * data, uint64_t size, const std::vector<trace_layer> & layers) {
    trace_contents out;
    for (const trace_layer & l : layers) {
        out.layers.push_back({ l.layer, l.n_expert, {}, {}, {} });
    }
    const auto fail = [&](uint64_t record, const std::string & what) {
        throw std::runtime_error("record " + std::to_string(record) + " " + what + "; hint: the trace is damaged; record it again");
    };

    std::vector<uint16_t> ids;
    std::vector<uint64_t> seen; // the last token that chose the expert, over all records
    uint64_t n_token = 0;
    for (uint64_t pos = 0; pos < size; ++out.n_records) {
        if (size - pos < trace_record_bytes) {
            out.truncated = true;
            break;
        }
        const uint32_t i_layer  = little_endian(data + pos, 2);
        const uint32_t n_used   = little_endian(data + pos + 2, 2);
        const uint32_t n_tokens = little_endian(data + pos + 4, 4);
        if (i_layer >= layers.size()) {
            fail(out.n_records, "is of layer " + std::to_string(i_layer) + " of " + std::to_string(layers.size()));
        }
        layer_trace & l = out.layers[i_layer];
        if (n_used == 0 || n_tokens == 0 || n_used > (uint32_t) l.n_expert) {
            fail(out.n_records, "has " + std::to_string(n_tokens) + " tokens that use " + std::to_string(n_used) + " of "
                + std::to_string(l.n_expert) + " experts");
        }
        const uint64_t id_bytes = trace_id_bytes(l.n_expert);
        const uint64_t n_ids    = (uint64_t) n_used * n_tokens;
        pos += trace_record_bytes;
        if (n_ids > (size - pos) / id_bytes) {
            out.truncated = true;
            break;
        }
        ids.resize(n_ids);
        if (seen.size() < (size_t) l.n_expert) {
            seen.resize(l.n_expert, 0);
        }
        for (uint64_t i = 0; i < n_ids; ++i) {
            n_token += i % n_used == 0;
            const uint32_t e = little_endian(data + pos + i * id_bytes, id_bytes);
            if (e >= (uint32_t) l.n_expert || seen[e] == n_token) {
                fail(out.n_records, "(layer " + std::to_string(l.layer) + ") has expert " + std::to_string(e) + " of "
                    + std::to_string(l.n_expert) + (e < (uint32_t) l.n_expert ? " twice for a token" : ""));
            }
            seen[e] = n_token;
            ids[i]  = (uint16_t) e;
        }
        l.add((int32_t) n_used, n_tokens, ids);
        pos += n_ids * id_bytes;
    }
    return out;
}

void replay_counts::add(const replay_counts & o) {
    hits           += o.hits;
    misses         += o.misses;
    evictions      += o.evictions;
    misses_decode  += o.misses_decode;
    tokens_decode  += o.tokens_decode;
    tokens_prefill += o.tokens_prefill;
}

namespace {

// as stream::list_last(): of the last tokens, newest first, at most n_slot; then reversed, so that the newest is used last
class last_experts {
public:
    explicit last_experts(int32_t n_expert) : seen(n_expert, 0) {}

    const std::vector<int32_t> & of(const layer_trace & trace, const layer_trace::batch & b, int32_t n_slot) {
        ++mark;
        list.clear();
        for (int64_t t = (int64_t) b.n_tokens - 1; t >= 0 && (int32_t) list.size() < n_slot; --t) {
            for (int32_t k = 0; k < b.n_used && (int32_t) list.size() < n_slot; ++k) {
                const int32_t e = trace.ids[b.first_id + t * b.n_used + k];
                if (seen[e] != mark) {
                    seen[e] = mark;
                    list.push_back(e);
                }
            }
        }
        std::reverse(list.begin(), list.end());
        return list;
    }

private:
    std::vector<uint64_t> seen; // [n_expert]
    uint64_t              mark = 0;
    std::vector<int32_t>  list;
};

// Knows what comes. The pool tells it of uses; advance() says where in the trace they are.
class optimum final : public policy {
public:
    optimum(const layer_trace & trace, int32_t n_slot)
        : expert_in(n_slot, -1), kept(n_slot, false), uses(trace.n_expert), next(trace.n_expert, 0) {
        for (size_t i = 0; i < trace.batches.size(); ++i) {
            const uint64_t first = trace.batches[i].first_distinct;
            for (uint64_t j = first; j < first + trace.n_distinct(i); ++j) {
                uses[trace.distinct[j]].push_back(i);
            }
        }
    }

    void advance(size_t i_batch) { now = i_batch; }

    void on_use(int32_t slot, int32_t expert) override { expert_in[slot] = expert; }
    void on_fill(int32_t slot, int32_t expert) override { expert_in[slot] = expert; }
    void on_keep(int32_t slot) override { kept[slot] = true; }

    void on_empty(int32_t slot) override {
        expert_in[slot] = -1;
        kept[slot]      = false;
    }

    int32_t victim(const std::function<bool(int32_t)> & is_pinned) override {
        int32_t best     = -1;
        size_t  furthest = 0;
        for (int32_t slot = 0; slot < (int32_t) expert_in.size(); ++slot) {
            if (is_pinned(slot) || kept[slot]) {
                continue;
            }
            if (expert_in[slot] < 0) {
                return slot;
            }
            const size_t when = next_use(expert_in[slot]);
            if (best < 0 || when > furthest) {
                best     = slot;
                furthest = when;
            }
        }
        return best;
    }

private:
    // the next batch that wants it; beyond all of them when none does
    size_t next_use(int32_t expert) {
        const std::vector<size_t> & u = uses[expert];
        size_t & i = next[expert];
        while (i < u.size() && u[i] <= now) {
            ++i;
        }
        return i < u.size() ? u[i] : SIZE_MAX;
    }

    std::vector<int32_t>             expert_in; // [n_slot], -1: empty
    std::vector<bool>                kept;      // [n_slot] never offered
    std::vector<std::vector<size_t>> uses;      // [n_expert] the batches that want it
    std::vector<size_t>              next;      // [n_expert] index into uses
    size_t                           now = 0;
};

} // namespace

// as stream::begin_slots(), begin_staging() and copy_to_slots()
template <typename advance_t>
static replay_counts run(const layer_trace & trace, slot_pool & pool, const advance_t & advance) {
    const int32_t n_slot = pool.n_slot();
    replay_counts          c;
    last_experts           last(trace.n_expert);
    std::vector<int32_t>   experts;
    std::vector<placement> placed;

    const auto acquire = [&](const std::vector<int32_t> & wanted) {
        pool.acquire(wanted.data(), (int32_t) wanted.size(), placed);
        for (const placement & p : placed) {
            c.evictions += p.evicted;
            if (p.miss) {
                pool.commit(p.slot);
            }
        }
    };

    for (size_t i = 0; i < trace.batches.size(); ++i) {
        const layer_trace::batch & b = trace.batches[i];
        advance(i);
        const auto first = trace.distinct.begin() + b.first_distinct;
        experts.assign(first, first + trace.n_distinct(i));
        uint64_t n_miss = 0;
        for (const int32_t e : experts) {
            n_miss += pool.peek(e) < 0;
        }
        c.misses += n_miss;
        c.hits   += experts.size() - n_miss;
        if (fits_slots(trace.n_expert, n_slot, b.n_used, b.n_tokens)) {
            acquire(experts);
            c.misses_decode += n_miss;
            c.tokens_decode += b.n_tokens;
        } else {
            acquire(last.of(trace, b, n_slot));
            c.tokens_prefill += b.n_tokens;
        }
    }
    return c;
}

replay_counts replay(const layer_trace & trace, policy_kind kind, int32_t n_slot) {
    slot_pool pool(n_slot, trace.n_expert, kind);
    return run(trace, pool, [](size_t) {});
}

replay_counts replay_optimum(const layer_trace & trace, int32_t n_slot) {
    auto order = std::make_unique<optimum>(trace, n_slot);
    optimum & knows = *order;
    slot_pool pool(n_slot, trace.n_expert, std::move(order));
    return run(trace, pool, [&](size_t i) { knows.advance(i); });
}

} // namespace moe
