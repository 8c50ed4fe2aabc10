#include "policy.h"

#include <algorithm>
#include <cstdlib>

namespace moe {

const char * policy_name(policy_kind kind) {
    switch (kind) {
        case policy_kind::lru: return "lru";
        case policy_kind::lfu: return "lfu";
    }
    std::abort();
}

bool policy_from_name(const std::string & name, policy_kind & out) {
    for (policy_kind kind : { policy_kind::lru, policy_kind::lfu }) {
        if (name == policy_name(kind)) {
            out = kind;
            return true;
        }
    }
    return false;
}

// The slots in order of use, as a doubly linked ring through a sentinel (index n_slot): behind the sentinel stands the newest
// slot, before it the oldest.
class use_order {
public:
    explicit use_order(int32_t n_slot) : sentinel(n_slot), newer(n_slot + 1), older(n_slot + 1) {
        newer[sentinel] = older[sentinel] = sentinel;
        for (int32_t slot = 0; slot < n_slot; ++slot) {
            insert_after(slot, sentinel);
        }
    }

    int32_t oldest() const { return newer[sentinel]; } // the sentinel itself when the ring is empty
    int32_t newer_than(int32_t slot) const { return newer[slot]; }
    int32_t end() const { return sentinel; }

    void make_newest(int32_t slot) { unlink(slot); insert_after(slot, sentinel); }
    void make_oldest(int32_t slot) { unlink(slot); insert_after(slot, oldest()); }

private:
    // put slot right behind (older than) other
    void insert_after(int32_t slot, int32_t other) {
        const int32_t next = older[other];
        older[other] = slot;
        newer[slot]  = other;
        older[slot]  = next;
        newer[next]  = slot;
    }

    void unlink(int32_t slot) {
        older[newer[slot]] = older[slot];
        newer[older[slot]] = newer[slot];
    }

    int32_t              sentinel;
    std::vector<int32_t> newer;
    std::vector<int32_t> older;
};

namespace {

class lru final : public policy {
public:
    explicit lru(int32_t n_slot) : order(n_slot) {}

    void on_use(int32_t slot, int32_t /*expert*/) override { order.make_newest(slot); }
    void on_empty(int32_t slot) override { order.make_oldest(slot); }

    int32_t victim(const std::function<bool(int32_t)> & is_pinned) override {
        for (int32_t slot = order.oldest(); slot != order.end(); slot = order.newer_than(slot)) {
            if (!is_pinned(slot)) {
                return slot;
            }
        }
        return -1;
    }

private:
    use_order order;
};

// Least frequently used with ageing: uses are counted per expert and outlive an eviction, so that an expert that returns is
// not a stranger; all counts are halved every `period` uses, so that yesterday's favourites leave. Ties go to the least recent.
class lfu final : public policy {
public:
    lfu(int32_t n_slot, int32_t n_expert) : order(n_slot), expert_in(n_slot, -1), uses(n_expert, 0), period(64 * n_expert) {}

    void on_use(int32_t slot, int32_t expert) override {
        expert_in[slot] = expert;
        uses[expert] += 1;
        order.make_newest(slot);
        if (++n_since_halving >= period) {
            n_since_halving = 0;
            for (uint32_t & n : uses) {
                n /= 2;
            }
        }
    }

    void on_empty(int32_t slot) override {
        expert_in[slot] = -1;
        order.make_oldest(slot);
    }

    int32_t victim(const std::function<bool(int32_t)> & is_pinned) override {
        int32_t best = -1;
        for (int32_t slot = order.oldest(); slot != order.end(); slot = order.newer_than(slot)) {
            if (is_pinned(slot)) {
                continue;
            }
            if (expert_in[slot] < 0) {
                return slot;
            }
            if (best < 0 || uses[expert_in[slot]] < uses[expert_in[best]]) {
                best = slot;
            }
        }
        return best;
    }

private:
    use_order             order;
    std::vector<int32_t>  expert_in; // [n_slot], -1: empty
    std::vector<uint32_t> uses;      // [n_expert]
    const int64_t         period;
    int64_t               n_since_halving = 0;
};

} // namespace

std::unique_ptr<policy> make_policy(policy_kind kind, int32_t n_slot, int32_t n_expert) {
    switch (kind) {
        case policy_kind::lru: return std::make_unique<lru>(n_slot);
        case policy_kind::lfu: return std::make_unique<lfu>(n_slot, n_expert);
    }
    std::abort();
}

} // namespace moe
