// What the replacement policies cost, and what they find; the engine's own code without a model.
//
// usage: policies cost                      nanoseconds of begin_slots() when every expert is in its slot, and of a victim
//        policies hits [ROUTING.csv]        share of hits by slots, on made routing or what routing-dump wrote
//        policies ram [ROUTING.csv]         what a RAM tier below the slots finds, exclusive and inclusive

#include "ram-tier.h"
#include "stream.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

using namespace moe;

static const policy_kind kinds[] = { policy_kind::lru, policy_kind::lfu, policy_kind::heat };

//
// cost
//

namespace {

class zeros final : public file_source {
public:
    const std::string & name(int32_t) const override { return name_; }
    uint32_t alignment() const override { return 1; }
    int64_t read_at(int32_t, void * buf, uint64_t size, uint64_t) override {
        memset(buf, 0, size);
        return (int64_t) size;
    }

private:
    std::string name_ = "zeros";
};

} // namespace

static constexpr int32_t n_expert = 128;
static constexpr int32_t n_slot   = 64;
static constexpr int32_t n_used   = 8;
static constexpr int32_t n_layer  = 48;

static double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

static double ns_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
}

// in the order of a token through the layers, so that each layer's state is as cold as it is then
static double begin_ns(policy_kind kind) {
    std::vector<uint8_t> slots(n_layer * n_slot * 3 * 64);
    std::vector<layer_desc> descs;
    for (int32_t i = 0; i < n_layer; ++i) {
        layer_desc d { i, n_expert, n_slot, {} };
        for (int32_t part = 0; part < 3; ++part) {
            d.parts.push_back({ 0, 0, 64, slots.data() + (i * 3 + part) * n_slot * 64, 0 });
        }
        descs.push_back(d);
    }
    stream::options opt;
    opt.policy = kind;
    stream s(opt, descs, std::make_unique<reader>(std::make_unique<zeros>(), 1));

    std::mt19937 rnd(1);
    std::vector<int32_t> experts(n_slot);
    std::iota(experts.begin(), experts.end(), 0);
    std::vector<int32_t> ids(n_slot);
    std::vector<double>  samples;
    for (int32_t step = 0; step < 2000; ++step) {
        double ns = 0;
        s.compute_begin();
        for (int32_t i = 0; i < n_layer; ++i) {
            const int32_t n = step == 0 ? n_slot : n_used; // all slots are filled first
            std::shuffle(experts.begin(), experts.end(), rnd);
            const auto start = std::chrono::steady_clock::now();
            s.begin_slots(i, { (const uint8_t *) experts.data(), n, 1, 4, (uint64_t) n * 4 }, ids.data());
            ns += ns_since(start);
            s.wait(i, false, true);
            s.settle(i, false);
        }
        s.compute_end(true);
        if (step >= 100) {
            samples.push_back(ns / n_layer);
        }
    }
    return median(samples);
}

// eight of the slots pinned, as when a token misses once
static double victim_ns(policy_kind kind, int32_t n) {
    const auto p = make_policy(kind, n, 2 * n);
    std::mt19937 rnd(1);
    std::vector<int32_t> pins(n);
    std::vector<double>  samples;
    for (int32_t step = 0; step < 20000; ++step) {
        std::vector<int32_t> used;
        for (int32_t i = 0; i < n_used; ++i) {
            used.push_back((int32_t) (rnd() % n));
            p->on_use(used[i], used[i]);
            pins[used[i]] = 1;
        }
        const auto start = std::chrono::steady_clock::now();
        const int32_t slot = p->victim([&](int32_t s) { return pins[s] != 0; });
        samples.push_back(ns_since(start));
        if (slot < 0) {
            abort();
        }
        for (const int32_t s : used) {
            pins[s] = 0;
        }
    }
    return median(samples);
}

static void print_cost() {
    printf("begin_slots of %d hits among %d slots, %d experts, ns:\n", n_used, n_slot, n_expert);
    for (const policy_kind kind : kinds) {
        printf("  %-4s %6.0f\n", policy_name(kind), begin_ns(kind));
    }
    printf("victim with %d pinned, by slots, ns (clock included):\n", n_used);
    for (const policy_kind kind : kinds) {
        printf("  %-4s", policy_name(kind));
        for (const int32_t n : { 64, 512, 4096 }) {
            printf("  %d: %.0f", n, victim_ns(kind, n));
        }
        printf("\n");
    }
}

//
// hits
//

namespace {

using routing = std::vector<std::vector<int32_t>>; // the experts of each token

struct workload {
    std::string          name;
    int32_t              n_expert;
    std::vector<routing> layers;
};

} // namespace

// Logits as in synthetic.py: popularity (Zipf) that wanders from one order of the experts to another every `drift` tokens (0: never), a
// part of each token's own, and topics that last some 5 and some 200 tokens.
static routing make_routing(double skew, double locality, int32_t drift, uint32_t seed) {
    std::mt19937 rnd(seed);
    std::normal_distribution<double> normal(0, 1);
    std::vector<int32_t> order(n_expert);
    std::iota(order.begin(), order.end(), 0);
    const auto popularity = [&] {
        std::shuffle(order.begin(), order.end(), rnd);
        std::vector<double> p(n_expert);
        double mean = 0, square = 0;
        for (int32_t i = 0; i < n_expert; ++i) {
            p[order[i]] = -std::log(i + 1.0);
            mean   += p[order[i]] / n_expert;
            square += p[order[i]] * p[order[i]] / n_expert;
        }
        for (double & x : p) {
            x = (x - mean) / std::sqrt(square - mean * mean);
        }
        return p;
    };
    std::vector<double> from = popularity();
    std::vector<double> to   = popularity();
    std::vector<double> quick(n_expert), slow(n_expert);
    for (int32_t e = 0; e < n_expert; ++e) {
        quick[e] = normal(rnd);
        slow[e]  = normal(rnd);
    }

    routing out;
    for (int32_t t = 0; t < 4000; ++t) {
        if (drift > 0 && t > 0 && t % drift == 0) {
            from = to;
            to   = popularity();
        }
        const double way = drift > 0 ? (double) (t % drift) / drift : 0;
        std::vector<double> logits(n_expert);
        for (int32_t e = 0; e < n_expert; ++e) {
            quick[e]  = 0.8   * quick[e] + 0.6 * normal(rnd);
            slow[e]   = 0.995 * slow[e]  + 0.1 * normal(rnd);
            logits[e] = skew * ((1 - way) * from[e] + way * to[e]) + normal(rnd) + locality * 0.7 * (quick[e] + slow[e]);
        }
        std::vector<int32_t> best(n_expert);
        std::iota(best.begin(), best.end(), 0);
        std::partial_sort(best.begin(), best.begin() + n_used, best.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
        best.resize(n_used);
        out.push_back(best);
    }
    return out;
}

// lines of one sequence: step,sequence,layer,id,id,...
static workload read_dump(const char * path) {
    std::ifstream in(path);
    std::map<int32_t, routing> by_layer;
    workload w { path, 0, {} };
    for (std::string line; std::getline(in, line); ) {
        std::stringstream fields(line);
        std::vector<int32_t> numbers;
        for (std::string field; std::getline(fields, field, ','); ) {
            numbers.push_back(atoi(field.c_str()));
        }
        if (numbers.size() < 4) {
            fprintf(stderr, "%s: '%s' is no line of routing-dump\n", path, line.c_str());
            exit(1);
        }
        by_layer[numbers[2]].emplace_back(numbers.begin() + 3, numbers.end());
        w.n_expert = std::max(w.n_expert, *std::max_element(numbers.begin() + 3, numbers.end()) + 1);
    }
    if (by_layer.empty()) {
        fprintf(stderr, "%s: cannot be read, or is empty\n", path);
        exit(1);
    }
    for (auto & [layer, r] : by_layer) {
        w.layers.push_back(std::move(r));
    }
    return w;
}

// the first 64 tokens fill the slots and do not count
static double hit_percent(const routing & r, int32_t experts, int32_t slots, policy_kind kind) {
    slot_pool pool(slots, experts, kind);
    std::vector<placement> placed;
    int64_t n = 0, n_hit = 0;
    for (size_t t = 0; t < r.size(); ++t) {
        pool.acquire(r[t].data(), (int32_t) r[t].size(), placed);
        for (const placement & p : placed) {
            n     += t >= 64;
            n_hit += t >= 64 && !p.miss;
            if (p.miss) {
                pool.commit(p.slot);
            }
        }
    }
    return 100.0 * (double) n_hit / (double) std::max<int64_t>(n, 1);
}

static std::vector<workload> workloads_of(const char * dump) {
    std::vector<workload> workloads;
    const auto make = [&](const char * name, double skew, double locality, int32_t drift) {
        workload w { name, n_expert, {} };
        for (uint32_t seed = 1; seed <= 4; ++seed) {
            w.layers.push_back(make_routing(skew, locality, drift, seed));
        }
        workloads.push_back(std::move(w));
    };
    if (dump) {
        workloads.push_back(read_dump(dump));
    } else {
        make("popularity",                      1.0, 0.0, 0);
        make("popularity, topics",              1.0, 1.0, 0);
        make("popularity, topics, slow drift",  1.0, 1.0, 2000);
        make("popularity, topics, quick drift", 1.0, 1.0, 500);
        make("popularity, quickest drift",      1.2, 0.3, 300);
        make("topics",                          0.3, 1.5, 0);
    }
    return workloads;
}

static void print_hits(const char * dump) {
    const std::vector<workload> workloads = workloads_of(dump);
    printf("%-34s", "hits in % (lru lfu heat) at slots:");
    for (const char * share : { "1/8", "1/4", "1/2", "3/4" }) {
        printf("   %-14s", share);
    }
    printf("\n");
    for (const workload & w : workloads) {
        printf("%-34s", w.name.c_str());
        for (const double share : { 0.125, 0.25, 0.5, 0.75 }) {
            const int32_t slots = std::max((int32_t) (share * w.n_expert), (int32_t) w.layers[0][0].size());
            printf("  ");
            for (const policy_kind kind : kinds) {
                double sum = 0;
                for (const routing & r : w.layers) {
                    sum += hit_percent(r, w.n_expert, slots, kind);
                }
                printf(" %4.1f", sum / (double) w.layers.size());
            }
        }
        printf("\n");
    }
}

//
// RAM tier
//

namespace {

struct tier_counts {
    int64_t n      = 0; // experts used
    int64_t n_read = 0; // from the disk
    int64_t n_copy = 0; // between slots and slabs, both ways
};

} // namespace

// slots: of each layer; slabs: of all together. Exclusive as in stream.cpp; inclusive: what is read goes to a slab too, and stays there
// while it is in a slot. The first 64 tokens do not count.
static tier_counts use_tier(const workload & w, int32_t slots, int32_t slabs, bool exclusive) {
    const int32_t layers = (int32_t) w.layers.size();
    std::vector<std::unique_ptr<slot_pool>> pools;
    for (int32_t i = 0; i < layers; ++i) {
        pools.push_back(std::make_unique<slot_pool>(slots, w.n_expert, policy_kind::lru));
    }
    constexpr uint64_t bytes = ram_tier::alignment;
    ram_tier tier(std::vector<ram_tier::layer_size>(layers, { bytes, w.n_expert, exclusive ? slots : 0 }), slabs * bytes);
    tier_counts c;
    std::vector<placement> placed;
    for (size_t t = 0; t < w.layers[0].size(); ++t) {
        for (int32_t i = 0; i < layers; ++i) {
            const std::vector<int32_t> & used = w.layers[i][t];
            pools[i]->acquire(used.data(), (int32_t) used.size(), placed);
            const int64_t counts = t >= 64;
            for (const placement & p : placed) {
                c.n += counts;
                if (!p.miss) {
                    continue;
                }
                pools[i]->commit(p.slot);
                const int32_t slab = tier.find(i, p.expert);
                c.n_read += counts * (slab < 0);
                c.n_copy += counts * (slab >= 0);
                if (slab >= 0) {
                    tier.forget(slab);
                }
                const int32_t kept = exclusive ? p.victim : p.expert;
                if (kept >= 0) {
                    const int32_t to = tier.claim(i, kept);
                    if (to >= 0) {
                        tier.release(to);
                        c.n_copy += counts * (exclusive || slab < 0);
                    }
                }
            }
        }
    }
    return c;
}

static void print_tiers(const char * dump) {
    printf("experts read from the disk, %% of those used, by slots + slabs (shares of all experts):\n");
    printf("%-34s  all as slots, exclusive (copies %%), inclusive (copies %%)\n", "");
    for (const workload & w : workloads_of(dump)) {
        printf("%-34s", w.name.c_str());
        for (const auto & [slot_share, slab_share] : { std::pair { 0.125, 0.25 }, { 0.25, 0.25 }, { 0.25, 0.5 } }) {
            const auto share_of = [&](double share) { return std::max((int32_t) (share * w.n_expert), (int32_t) w.layers[0][0].size()); };
            const int32_t slots = share_of(slot_share);
            const int32_t slabs = (int32_t) (slab_share * w.n_expert * (double) w.layers.size());
            const auto percent = [](int64_t n, const tier_counts & c) { return 100.0 * (double) n / (double) c.n; };
            const tier_counts alone     = use_tier(w, share_of(slot_share + slab_share), 0, true);
            const tier_counts exclusive = use_tier(w, slots, slabs, true);
            const tier_counts inclusive = use_tier(w, slots, slabs, false);
            printf("   %.3f+%.2f: %4.1f %4.1f (%2.0f) %4.1f (%2.0f)", slot_share, slab_share, percent(alone.n_read, alone),
                percent(exclusive.n_read, exclusive), percent(exclusive.n_copy, exclusive), percent(inclusive.n_read, inclusive),
                percent(inclusive.n_copy, inclusive));
        }
        printf("\n");
    }
}

int main(int argc, char ** argv) {
    if (argc == 2 && strcmp(argv[1], "cost") == 0) {
        print_cost();
    } else if ((argc == 2 || argc == 3) && strcmp(argv[1], "hits") == 0) {
        print_hits(argc == 3 ? argv[2] : nullptr);
    } else if ((argc == 2 || argc == 3) && strcmp(argv[1], "ram") == 0) {
        print_tiers(argc == 3 ? argv[2] : nullptr);
    } else {
        fprintf(stderr, "usage: %s cost | hits [ROUTING.csv] | ram [ROUTING.csv]\n", argv[0]);
        return 2;
    }
    return 0;
}
