// Drives a slot pool and a plain model of it with the same random calls. The model predicts every hit and every victim; a fake
// store holds bytes per slot, victims are poisoned, and a ready slot must hold its expert's bytes at every step.
//
// usage: fuzz-slot-pool [seed [seconds]]

#include "check.h"
#include "policies.h"
#include "slot-pool.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

using namespace moe;

static constexpr uint8_t poison = 0xdd;

// Written from the headers' promises alone: maps and sequence numbers, everything looked up by walking.
struct pool_model {
    struct held {
        int32_t expert;
        bool    ready;
        int64_t used_at;
        int32_t n_use;   // since it came
        int64_t fill_at; // when it came without being asked for, else 0
    };

    policy_kind                kind;
    int32_t                    n_slot;
    int32_t                    n_expert;
    std::map<int32_t, held>    slots; // slot -> what it holds; empty slots are missing
    std::map<int32_t, int64_t> uses;  // expert -> count (lfu)
    std::map<int32_t, std::vector<int64_t>> used; // expert -> when (heat)
    std::set<int32_t>          pins;
    std::set<int32_t>          keeps; // experts
    int64_t                    now    = 0;
    int64_t                    n_fill = 0;

    int32_t find(int32_t expert) const {
        for (const auto & s : slots) {
            if (s.second.expert == expert) {
                return s.first;
            }
        }
        return -1;
    }

    void use(int32_t slot) {
        held & h = slots.at(slot);
        if (keeps.count(h.expert) && (h.used_at > 0 || h.fill_at > 0)) {
            return; // the policy is not told
        }
        h.used_at = ++now;
        h.n_use++;
        used[h.expert].push_back(now);
        uses[h.expert]++;
        if (now % (64 * n_expert) == 0) {
            for (auto & u : uses) {
                u.second /= 2;
            }
        }
    }

    bool has_empty_unpinned() const {
        for (int32_t s = 0; s < n_slot; ++s) {
            if (slots.count(s) == 0 && pins.count(s) == 0) {
                return true;
            }
        }
        return false;
    }

    // who leaves first when nothing else tells
    static int64_t age_order(const held & h) { return h.used_at > 0 ? h.used_at : -h.fill_at; }

    int64_t count(const held & h) const {
        const auto it = uses.find(h.expert);
        return it == uses.end() ? 0 : it->second;
    }

    double heat(const held & h) const {
        double sum = 0;
        const auto it = used.find(h.expert);
        for (size_t i = 0; it != used.end() && i < it->second.size(); ++i) {
            sum += std::exp2((double) (it->second[i] - now) / heat_half_life(n_expert));
        }
        return sum * (h.n_use == 1 ? heat_newcomer : 1.0);
    }

    // of the unpinned slots that hold something
    int32_t victim() const {
        int32_t best = -1;
        for (const auto & s : slots) {
            if (pins.count(s.first) || keeps.count(s.second.expert)) {
                continue;
            }
            if (best < 0) {
                best = s.first;
                continue;
            }
            const held & a = s.second;
            const held & b = slots.at(best);
            bool before = false;
            switch (kind) {
                case policy_kind::lru: before = age_order(a) < age_order(b); break;
                case policy_kind::lfu: before = std::make_pair(count(a), age_order(a)) < std::make_pair(count(b), age_order(b)); break;
                case policy_kind::heat: before = std::make_pair(heat(a), age_order(a)) < std::make_pair(heat(b), age_order(b)); break;
            }
            if (before) {
                best = s.first;
            }
        }
        return best;
    }
};

struct byte_store {
    static constexpr size_t n_byte = 16;

    std::vector<std::vector<uint8_t>> slots;

    static uint8_t byte_of(int32_t expert, size_t i) { return (uint8_t) (expert * 31 + i * 7 + 1); }

    void fill(int32_t slot, int32_t expert) {
        for (size_t i = 0; i < n_byte; ++i) {
            slots[slot][i] = byte_of(expert, i);
        }
    }

    bool holds(int32_t slot, int32_t expert) const {
        for (size_t i = 0; i < n_byte; ++i) {
            if (slots[slot][i] != byte_of(expert, i)) {
                return false;
            }
        }
        return true;
    }
};

static void compare(const slot_pool & pool, const pool_model & model, const byte_store & store) {
    pool.self_check();
    for (int32_t s = 0; s < model.n_slot; ++s) {
        const auto it = model.slots.find(s);
        CHECK_EQ(pool.pinned(s), model.pins.count(s) != 0);
        CHECK_EQ(pool.kept(s), it != model.slots.end() && model.keeps.count(it->second.expert) != 0);
        if (it == model.slots.end()) {
            CHECK(pool.state(s) == slot_state::empty);
            CHECK_EQ(pool.expert(s), -1);
            continue;
        }
        CHECK(pool.state(s) == (it->second.ready ? slot_state::ready : slot_state::filling));
        CHECK_EQ(pool.expert(s), it->second.expert);
    }
    for (int32_t e = 0; e < model.n_expert; ++e) {
        const int32_t slot = model.find(e);
        const int32_t got  = pool.peek(e);
        CHECK_EQ(got, slot >= 0 && model.slots.at(slot).ready ? slot : -1);
        if (got >= 0) {
            CHECK(store.holds(got, e));
        }
    }
}

static void acquire_both(slot_pool & pool, pool_model & model, byte_store & store, const std::vector<int32_t> & experts) {
    std::vector<placement> out;
    pool.acquire(experts.data(), (int32_t) experts.size(), out);

    model.pins.clear();
    CHECK_EQ(out.size(), experts.size());
    for (size_t i = 0; i < experts.size(); ++i) {
        CHECK_EQ(out[i].expert, experts[i]);
        const int32_t slot = model.find(experts[i]);
        CHECK_EQ(out[i].miss, slot < 0);
        if (slot >= 0) {
            CHECK_EQ(out[i].slot, slot);
            CHECK(!out[i].evicted);
            model.pins.insert(slot);
            model.use(slot);
        }
    }
    for (const placement & p : out) {
        if (!p.miss) {
            continue;
        }
        CHECK(model.pins.count(p.slot) == 0);
        if (model.has_empty_unpinned()) {
            CHECK(p.slot >= 0 && p.slot < model.n_slot);
            CHECK(model.slots.count(p.slot) == 0);
            CHECK(!p.evicted);
        } else {
            const int32_t expected = model.victim();
            if (p.slot != expected) { // sums of two orders may round to either side of a tie
                CHECK(model.kind == policy_kind::heat && model.slots.count(p.slot) == 1);
                const double heats[] = { model.heat(model.slots.at(expected)), model.heat(model.slots.at(p.slot)) };
                CHECK(heats[1] <= heats[0] * (1 + 1e-9));
            }
            CHECK(p.evicted);
        }
        model.slots[p.slot] = { p.expert, false, 0, 0, 0 };
        model.pins.insert(p.slot);
        model.use(p.slot);
        std::fill(store.slots[p.slot].begin(), store.slots[p.slot].end(), poison);
    }
}

static void reserve_both(slot_pool & pool, pool_model & model, byte_store & store, int32_t expert) {
    const bool    there = model.find(expert) >= 0;
    const int32_t slot  = pool.reserve(expert);
    if (there || !model.has_empty_unpinned()) {
        CHECK_EQ(slot, -1);
        return;
    }
    CHECK(slot >= 0 && slot < model.n_slot);
    CHECK(model.slots.count(slot) == 0 && model.pins.count(slot) == 0);
    model.slots[slot] = { expert, false, 0, 1, ++model.n_fill };
    std::fill(store.slots[slot].begin(), store.slots[slot].end(), poison);
}

// one pool's life: n_step acquires, with everything that may happen between two of them
static int64_t run_round(uint64_t seed) {
    test_random rnd(seed);

    const std::vector<policy_kind> kinds = all_policies();
    pool_model model;
    model.kind     = kinds[rnd.below(kinds.size())];
    model.n_expert = rnd.between(1, rnd.percent(20) ? 4 : 48);
    model.n_slot   = rnd.between(1, model.n_expert + (rnd.percent(20) ? 3 : 0));

    slot_pool  pool(model.n_slot, model.n_expert, model.kind);
    byte_store store;
    store.slots.assign(model.n_slot, std::vector<uint8_t>(byte_store::n_byte, poison));

    const uint32_t fail_percent = rnd.percent(50) ? 0 : (uint32_t) rnd.below(60);
    const bool     skewed       = rnd.percent(60);
    const uint32_t fill_percent = rnd.percent(50) ? 0 : (uint32_t) rnd.below(60);
    const int32_t  n_keep       = rnd.percent(50) ? 0 : (int32_t) rnd.below(std::min(model.n_slot, model.n_expert));
    while ((int32_t) model.keeps.size() < n_keep) {
        const int32_t e = (int32_t) rnd.below(model.n_expert);
        if (model.keeps.insert(e).second) {
            pool.keep(e);
        }
    }
    const int32_t  n_max        = model.n_slot >= model.n_expert ? model.n_expert : model.n_slot - n_keep;
    const int32_t  n_step       = (int32_t) rnd.between(20, 200);

    set_check_context("round seed " + std::to_string(seed) + ": " + policy_name(model.kind) + ", " +
        std::to_string(model.n_slot) + " slots, " + std::to_string(model.n_expert) + " experts");
    compare(pool, model, store);

    for (int32_t step = 0; step < n_step; ++step) {
        std::vector<int32_t> experts;
        const int32_t n = (int32_t) rnd.between(0, n_max);
        while ((int32_t) experts.size() < n) {
            const int32_t e = (int32_t) (skewed && rnd.percent(70) ? rnd.below(n_max) : rnd.below(model.n_expert));
            if (std::find(experts.begin(), experts.end(), e) == experts.end()) {
                experts.push_back(e);
            }
        }
        acquire_both(pool, model, store, experts);
        compare(pool, model, store);
        while (rnd.percent(fill_percent)) {
            reserve_both(pool, model, store, (int32_t) rnd.below(model.n_expert));
            compare(pool, model, store);
        }

        std::vector<int32_t> filling;
        for (const auto & s : model.slots) {
            if (!s.second.ready) {
                filling.push_back(s.first);
            }
        }
        while (!filling.empty()) {
            if (rnd.percent(3) && !model.slots.empty()) {
                const int32_t slot = std::next(model.slots.begin(), rnd.below(model.slots.size()))->first;
                if (model.slots.at(slot).ready) { // the bytes went bad
                    store.slots[slot][0] ^= 1;
                    pool.drop(slot);
                    model.slots.erase(slot);
                    compare(pool, model, store);
                }
            }
            if (rnd.percent(3)) {
                pool.unpin_all();
                model.pins.clear();
            }
            // fills end in any order
            const size_t  i    = rnd.below(filling.size());
            const int32_t slot = filling[i];
            filling.erase(filling.begin() + i);
            if (rnd.percent(fail_percent)) {
                store.slots[slot][0] = 0; // a partial fill
                pool.fail(slot);
                model.slots.erase(slot);
            } else {
                store.fill(slot, model.slots.at(slot).expert);
                pool.commit(slot);
                model.slots.at(slot).ready = true;
            }
            compare(pool, model, store);
        }
    }
    return n_step;
}

int main(int argc, char ** argv) {
    int64_t n_acquire = 0;
    return run_fuzzer(argc, argv, [&](uint64_t seed) { n_acquire += run_round(seed); },
        [&] { return ", " + std::to_string(n_acquire) + " acquires"; });
}
