#pragma once

// Who is evicted: the replacement policies of a slot pool.
//
// A policy is pure: it is told what happened to the slots of one pool, and names a victim when asked. No clock, no I/O,
// no lock; time is the order of the calls. One instance serves one pool and is driven by one thread at a time.
//
//   lru    the least recently used.
//   lfu    the least frequently used, with ageing: counts are per expert and outlive an eviction, so that an expert that returns is
//          no stranger; all are halved every 64 uses an expert, so that yesterday's favourites leave. Ties go to the least recent.
//   heat   the coldest. Heat is the sum of an expert's uses, each worth half as much after every heat_half_life() uses of the pool; it
//          outlives an eviction too. With hysteresis: a newcomer, until it is used a second time in its slot, counts as heat_newcomer
//          of its heat. So one use displaces nothing that is warm: it is the first to leave again.
//
// Costs: lru O(1); lfu and heat O(log n_slot) a use, and what halving or rescaling costs is O(1) a use. victim() steps over the
// pinned slots it meets.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace moe {

enum class policy_kind : int32_t { lru = 0, lfu = 1, heat = 2 };

// uses of the pool, all experts counted, after which a use is worth half (measured: docs/measuring.md)
inline int64_t heat_half_life(int32_t n_expert) { return 3 * (int64_t) n_expert; }

constexpr double heat_newcomer = 0.75;

const char * policy_name(policy_kind kind);
bool         policy_from_name(const std::string & name, policy_kind & out);

class policy {
public:
    virtual ~policy() = default;

    // the expert in this slot was asked for (called for hits, and for a miss right after the slot was given to it); it is in no other
    virtual void on_use(int32_t slot, int32_t expert) = 0;

    // the slot was given an expert that nobody asked for; of such, what came earlier stays longer, and lru offers all of them first
    virtual void on_fill(int32_t slot, int32_t expert) = 0;

    // the slot holds nothing any more: it is offered before any slot that holds something
    virtual void on_empty(int32_t slot) = 0;

    // the slot keeps what it holds: it is not offered, and on_use() not called for it, until on_empty()
    virtual void on_keep(int32_t slot) = 0;

    // the slot to give up, never one for which is_pinned(slot) holds; -1 when all are pinned or kept
    virtual int32_t victim(const std::function<bool(int32_t)> & is_pinned) = 0;
};

// n_slot, n_expert: counts, both > 0
std::unique_ptr<policy> make_policy(policy_kind kind, int32_t n_slot, int32_t n_expert);

} // namespace moe
