#include "policy.h"

#include <cmath>
#include <cstdlib>

namespace moe {

const char * policy_name(policy_kind kind) {
    switch (kind) {
        case policy_kind::lru:  return "lru";
        case policy_kind::lfu:  return "lfu";
        case policy_kind::heat: return "heat";
    }
    std::abort();
}

bool policy_from_name(const std::string & name, policy_kind & out) {
    for (policy_kind kind : { policy_kind::lru, policy_kind::lfu, policy_kind::heat }) {
        if (name == policy_name(kind)) {
            out = kind;
            return true;
        }
    }
    return false;
}

namespace {

// The slots in order of use, as a doubly linked ring through a sentinel (index n_slot): behind the sentinel stands the newest
// slot, before it the oldest. A border (index n_slot + 1) parts the empty ones, which are the oldest, from the others. A slot that is in
// no order is a ring of its own.
class use_order {
public:
    explicit use_order(int32_t n_slot) : sentinel(n_slot), border(n_slot + 1), newer(n_slot + 2), older(n_slot + 2) {
        newer[sentinel] = older[sentinel] = sentinel;
        insert_after(border, sentinel);
        for (int32_t slot = 0; slot < n_slot; ++slot) {
            insert_after(slot, border);
        }
    }

    int32_t oldest() const { return past_border(newer[sentinel]); } // the sentinel itself when the ring is empty
    int32_t newer_than(int32_t slot) const { return past_border(newer[slot]); }
    int32_t end() const { return sentinel; }

    void make_newest(int32_t slot) { unlink(slot); insert_after(slot, sentinel); }
    void make_oldest(int32_t slot) { unlink(slot); insert_before(slot, border); } // of those that are not empty
    void make_empty (int32_t slot) { unlink(slot); insert_after(slot, newer[sentinel]); }

    void remove(int32_t slot) {
        unlink(slot);
        newer[slot] = older[slot] = slot;
    }

private:
    int32_t past_border(int32_t slot) const { return slot == border ? newer[slot] : slot; }

    void insert_before(int32_t slot, int32_t other) { insert_after(slot, newer[other]); }

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
    int32_t              border;
    std::vector<int32_t> newer;
    std::vector<int32_t> older;
};

// The slots by rank, the lowest on top: a binary heap that knows where each slot is. Equal ranks are ordered by the last use.
class rank_heap {
public:
    static constexpr double empty_rank = -1; // before all that hold something

    explicit rank_heap(int32_t n_slot) : order(n_slot), where(n_slot), ranks(n_slot, empty_rank), used_at(n_slot, 0) {
        for (int32_t slot = 0; slot < n_slot; ++slot) {
            order[slot] = where[slot] = slot;
        }
    }

    bool holds(int32_t slot) const { return where[slot] >= 0; }

    // put it where it belongs, or back in when it was removed
    void update(int32_t slot, double rank, int64_t used) {
        ranks[slot]   = rank;
        used_at[slot] = used;
        if (!holds(slot)) {
            where[slot] = (int32_t) order.size();
            order.push_back(slot); // there is room: it was here before
        }
        sink(rise(where[slot]));
    }

    void remove(int32_t slot) {
        const int32_t pos  = where[slot];
        const int32_t last = order.back();
        order.pop_back();
        where[slot] = -1;
        if (last != slot) {
            put(last, pos);
            sink(rise(pos));
        }
    }

    // rank_of(slot): the new rank of each slot that is not empty; any order may come of it
    template <typename F> void change_all(const F & rank_of) {
        for (const int32_t slot : order) {
            if (ranks[slot] != empty_rank) {
                ranks[slot] = rank_of(slot);
            }
        }
        for (int32_t pos = (int32_t) order.size() / 2 - 1; pos >= 0; --pos) {
            sink(pos);
        }
    }

    // the lowest that is not pinned, -1 when all are; looks at the pinned ones before it and their neighbours
    int32_t lowest(const std::function<bool(int32_t)> & is_pinned) const {
        int32_t best = -1;
        look_below(0, is_pinned, best);
        return best;
    }

private:
    bool before(int32_t a, int32_t b) const {
        return ranks[a] != ranks[b] ? ranks[a] < ranks[b] : used_at[a] < used_at[b];
    }

    void look_below(int32_t pos, const std::function<bool(int32_t)> & is_pinned, int32_t & best) const {
        if (pos >= (int32_t) order.size() || (best >= 0 && !before(order[pos], best))) {
            return;
        }
        if (!is_pinned(order[pos])) {
            best = order[pos];
            return;
        }
        look_below(2 * pos + 1, is_pinned, best);
        look_below(2 * pos + 2, is_pinned, best);
    }

    void put(int32_t slot, int32_t pos) {
        order[pos]  = slot;
        where[slot] = pos;
    }

    int32_t rise(int32_t pos) {
        const int32_t slot = order[pos];
        while (pos > 0 && before(slot, order[(pos - 1) / 2])) {
            put(order[(pos - 1) / 2], pos);
            pos = (pos - 1) / 2;
        }
        put(slot, pos);
        return pos;
    }

    void sink(int32_t pos) {
        const int32_t slot = order[pos];
        const int32_t n    = (int32_t) order.size();
        while (2 * pos + 1 < n) {
            int32_t child = 2 * pos + 1;
            if (child + 1 < n && before(order[child + 1], order[child])) {
                ++child;
            }
            if (!before(order[child], slot)) {
                break;
            }
            put(order[child], pos);
            pos = child;
        }
        put(slot, pos);
    }

    std::vector<int32_t> order;   // by place in the heap
    std::vector<int32_t> where;   // [n_slot] place in the heap, -1: removed
    std::vector<double>  ranks;   // [n_slot]
    std::vector<int64_t> used_at; // [n_slot]
};

class lru final : public policy {
public:
    explicit lru(int32_t n_slot) : order(n_slot) {}

    void on_use(int32_t slot, int32_t /*expert*/) override { order.make_newest(slot); }
    void on_fill(int32_t slot, int32_t /*expert*/) override { order.make_oldest(slot); }
    void on_empty(int32_t slot) override { order.make_empty(slot); }
    void on_keep(int32_t slot) override { order.remove(slot); }

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

class lfu final : public policy {
public:
    lfu(int32_t n_slot, int32_t n_expert) : order(n_slot), expert_in(n_slot, -1), uses(n_expert, 0), period(64 * n_expert) {}

    void on_use(int32_t slot, int32_t expert) override {
        expert_in[slot] = expert;
        uses[expert] += 1;
        order.update(slot, rank(slot), ++n_use);
        if (n_use % period == 0) {
            for (uint32_t & n : uses) {
                n /= 2;
            }
            order.change_all([this](int32_t s) { return rank(s); });
        }
    }

    void on_fill(int32_t slot, int32_t expert) override {
        expert_in[slot] = expert;
        order.update(slot, rank(slot), -++n_fill);
    }

    void on_empty(int32_t slot) override { order.update(slot, rank_heap::empty_rank, 0); }
    void on_keep(int32_t slot) override { order.remove(slot); }

    int32_t victim(const std::function<bool(int32_t)> & is_pinned) override { return order.lowest(is_pinned); }

private:
    double rank(int32_t slot) const { return uses[expert_in[slot]]; }

    rank_heap             order;
    std::vector<int32_t>  expert_in; // [n_slot], of those that hold something
    std::vector<uint32_t> uses;      // [n_expert]
    const int64_t         period;
    int64_t               n_use  = 0;
    int64_t               n_fill = 0;
};

// Instead of every heat falling with each use, what a use adds rises: the order is the same, and only the expert used changes.
class heat final : public policy {
public:
    heat(int32_t n_slot, int32_t n_expert)
        : order(n_slot), expert_in(n_slot, -1), is_newcomer(n_slot, 0), heats(n_expert, 0), growth(std::exp2(1.0 / heat_half_life(n_expert))) {}

    void on_use(int32_t slot, int32_t expert) override {
        is_newcomer[slot] = expert_in[slot] != expert;
        expert_in[slot]   = expert;
        worth *= growth;
        heats[expert] += worth;
        if (worth > worth_max) { // long before a sum could overflow
            for (double & h : heats) {
                h /= worth;
            }
            worth = 1;
            order.change_all([this](int32_t s) { return rank(s); });
        }
        order.update(slot, rank(slot), ++n_use);
    }

    void on_fill(int32_t slot, int32_t expert) override {
        expert_in[slot]   = expert;
        is_newcomer[slot] = 1;
        order.update(slot, rank(slot), -++n_fill);
    }

    void on_empty(int32_t slot) override {
        expert_in[slot] = -1;
        order.update(slot, rank_heap::empty_rank, 0);
    }

    void on_keep(int32_t slot) override { order.remove(slot); }

    int32_t victim(const std::function<bool(int32_t)> & is_pinned) override { return order.lowest(is_pinned); }

private:
    static constexpr double worth_max = 1e100;

    double rank(int32_t slot) const { return heats[expert_in[slot]] * (is_newcomer[slot] ? heat_newcomer : 1.0); }

    rank_heap            order;
    std::vector<int32_t> expert_in;   // [n_slot], -1: empty
    std::vector<uint8_t> is_newcomer; // [n_slot]
    std::vector<double>  heats;       // [n_expert], in units of what a use was worth at the start or the last rescaling
    const double         growth;
    double               worth = 1;   // of a use now
    int64_t              n_use  = 0;
    int64_t              n_fill = 0;
};

} // namespace

std::unique_ptr<policy> make_policy(policy_kind kind, int32_t n_slot, int32_t n_expert) {
    switch (kind) {
        case policy_kind::lru:  return std::make_unique<lru>(n_slot);
        case policy_kind::lfu:  return std::make_unique<lfu>(n_slot, n_expert);
        case policy_kind::heat: return std::make_unique<heat>(n_slot, n_expert);
    }
    std::abort();
}

} // namespace moe
