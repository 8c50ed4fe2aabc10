#pragma once

// Who is evicted: the replacement policies of a slot pool.
//
// A policy is pure: it is told what happened to the slots of one pool, and names a victim when asked. No clock, no I/O,
// no lock; time is the order of the calls. One instance serves one pool and is driven by one thread at a time.
//
// Every call costs O(1), with two exceptions: victim() steps over the pinned slots it meets, and lfu looks at each slot once for
// a victim and at each expert once a halving.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace moe {

enum class policy_kind : int32_t { lru = 0, lfu = 1 };

const char * policy_name(policy_kind kind);
bool         policy_from_name(const std::string & name, policy_kind & out);

class policy {
public:
    virtual ~policy() = default;

    // the expert in this slot was asked for (called for hits, and for a miss right after the slot was given to it)
    virtual void on_use(int32_t slot, int32_t expert) = 0;

    // the slot holds nothing any more: it is offered before any slot that holds something
    virtual void on_empty(int32_t slot) = 0;

    // the slot to give up, never one for which is_pinned(slot) holds; -1 when all are pinned
    virtual int32_t victim(const std::function<bool(int32_t)> & is_pinned) = 0;
};

// n_slot, n_expert: counts, both > 0
std::unique_ptr<policy> make_policy(policy_kind kind, int32_t n_slot, int32_t n_expert);

} // namespace moe
