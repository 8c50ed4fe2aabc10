// Drives a moe::stream through random graphs, as moe-hooks.cpp does, and a model of it that predicts every id, every failed
// read and every counter. After each join a team of threads compares the row behind every id with the file.
//
// What a round draws: layers of different shapes; batches from one token to wide, the last layer with fewer tokens; ids with
// strides; reads that come short, late, interrupted or not at all; graphs that stop in the middle; two contexts in turn.
//
// The seed fixes the calls of each context and the places that fail, not how threads and contexts interleave.
//
// usage: fuzz-stream [seed [seconds]]

#include "check.h"
#include "fake-experts.h"
#include "policies.h"
#include "stream.h"

#include <condition_variable>
#include <set>

using namespace moe;

static int64_t n_graphs_total = 0;
static int64_t n_failed_total = 0;
static int64_t n_ahead_total  = 0;
static int64_t n_staged_total = 0;

// the compute threads of a context: run() is one node, with a barrier behind it
class thread_team {
public:
    explicit thread_team(int32_t n) : n(n) {
        for (int32_t ith = 1; ith < n; ++ith) {
            threads.emplace_back([this, ith] { work(ith); });
        }
    }

    ~thread_team() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            stopping = true;
        }
        changed.notify_all();
        for (std::thread & t : threads) {
            t.join();
        }
    }

    void run(const std::function<void(int32_t ith)> & fn) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            node      = &fn;
            n_working = n - 1;
            ++i_node;
        }
        changed.notify_all();
        fn(0);
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return n_working == 0; });
    }

    const int32_t n;

private:
    void work(int32_t ith) {
        uint64_t i_done = 0;
        std::unique_lock<std::mutex> lock(mutex);
        while (true) {
            changed.wait(lock, [&] { return stopping || i_node != i_done; });
            if (stopping) {
                return;
            }
            i_done = i_node;
            const auto * fn = node;
            lock.unlock();
            (*fn)(ith);
            lock.lock();
            if (--n_working == 0) {
                changed.notify_all();
            }
        }
    }

    std::mutex               mutex;
    std::condition_variable  changed;
    std::vector<std::thread> threads;
    const std::function<void(int32_t)> * node = nullptr;
    uint64_t i_node    = 0;
    int32_t  n_working = 0;
    bool     stopping  = false;
};

using batch = std::vector<std::vector<int32_t>>; // [token][k]: expert

static std::vector<int32_t> distinct_of(const batch & b) {
    std::vector<int32_t> out;
    for (const auto & token : b) {
        for (const int32_t e : token) {
            if (std::find(out.begin(), out.end(), e) == out.end()) {
                out.push_back(e);
            }
        }
    }
    return out;
}

// Written from stream.h's promises. Slots are predicted by a slot pool of its own (fuzz-slot-pool.cpp answers for that one).
struct stream_model {
    struct layer_model {
        int32_t   n_slot;
        uint64_t  expert_bytes;
        slot_pool pool;
        std::vector<placement> reading; // misses between begin and join
        uint64_t  hits = 0, misses = 0, evictions = 0, n_read = 0, n_copied = 0;

        layer_model(const layer_desc & d, policy_kind kind)
            : n_slot(d.n_slot), expert_bytes(d.expert_bytes()), pool(d.n_slot, d.n_expert, kind) {}
    };

    struct half_model {
        int32_t           i_layer = -1;
        std::set<int32_t> there;   // rows that hold their expert, or will
        std::set<int32_t> failing; // of those: on their way, and will not come
        std::set<int32_t> wanted;  // by the layer that has begun
    };

    std::vector<std::unique_ptr<layer_model>> layers;
    half_model halves[2];
    std::vector<std::set<int32_t>> bad; // [layer]: experts that cannot be read
    bool     error = false;             // of the running graph
    uint64_t tokens_decode = 0, tokens_prefill = 0, read_errors = 0;

    stream_model(const std::vector<layer_desc> & descs, policy_kind kind) : bad(descs.size()) {
        for (const layer_desc & d : descs) {
            layers.push_back(std::make_unique<layer_model>(d, kind));
        }
    }

    half_model & half_of(int32_t i_layer) { return halves[i_layer & 1]; }

    void begin_slots(int32_t i_layer, const batch & b) {
        layer_model & l = *layers[i_layer];
        const std::vector<int32_t> experts = distinct_of(b);
        std::vector<placement> placed;
        l.pool.acquire(experts.data(), (int32_t) experts.size(), placed);
        for (const placement & p : placed) {
            (p.miss ? l.misses : l.hits) += 1;
            l.n_read    += p.miss;
            l.evictions += p.evicted;
            if (p.miss) {
                l.reading.push_back(p);
            }
        }
        if (i_layer == 0) {
            tokens_decode += b.size();
        }
    }

    void fill(int32_t i_layer, const std::vector<int32_t> & experts) {
        half_model & h = half_of(i_layer);
        if (h.i_layer != i_layer) {
            h = { i_layer, {}, {}, {} };
        }
        layer_model & l = *layers[i_layer];
        for (const int32_t e : experts) {
            if (!h.there.insert(e).second) {
                continue;
            }
            if (l.pool.peek(e) >= 0) {
                l.n_copied++;
            } else {
                l.n_read++;
                if (bad[i_layer].count(e)) {
                    h.failing.insert(e);
                }
            }
        }
    }

    void begin_staging(int32_t i_layer, const batch & b, bool read_next) {
        layer_model & l = *layers[i_layer];
        const std::vector<int32_t> experts = distinct_of(b);
        for (const int32_t e : experts) {
            (l.pool.peek(e) >= 0 ? l.hits : l.misses) += 1;
        }
        fill(i_layer, experts);
        half_of(i_layer).wanted = std::set<int32_t>(experts.begin(), experts.end());
        if (i_layer == 0) {
            tokens_prefill += b.size();
        }
        if (read_next) {
            std::vector<int32_t> all(layers[i_layer + 1]->pool.n_expert());
            for (size_t e = 0; e < all.size(); ++e) {
                all[e] = (int32_t) e;
            }
            fill(i_layer + 1, all);
        }
    }

    // the experts of the batch that come out as zeros
    std::set<int32_t> settle_slots(int32_t i_layer) {
        layer_model & l = *layers[i_layer];
        std::set<int32_t> failed;
        for (const placement & p : l.reading) {
            if (bad[i_layer].count(p.expert)) {
                l.pool.fail(p.slot);
                failed.insert(p.expert);
            } else {
                l.pool.commit(p.slot);
            }
        }
        l.reading.clear();
        read_errors += failed.size();
        error = error || !failed.empty();
        return failed;
    }

    std::set<int32_t> settle_half(half_model & h) {
        const std::set<int32_t> failed = h.failing;
        for (const int32_t e : failed) {
            h.there.erase(e);
            error = error || h.wanted.count(e) != 0; // what was only read ahead, nobody misses
        }
        h.failing.clear();
        h.wanted.clear();
        read_errors += failed.size();
        return failed;
    }

    std::set<int32_t> settle_staging(int32_t i_layer, const batch & b) {
        const std::set<int32_t> failed = settle_half(half_of(i_layer));
        if (error) {
            return failed;
        }
        // the last tokens' experts go to the slots, so that the newest is the last that the policy gives up
        layer_model & l = *layers[i_layer];
        std::vector<int32_t> experts = distinct_of(batch(b.rbegin(), b.rend()));
        experts.resize(std::min(experts.size(), (size_t) l.n_slot));
        std::reverse(experts.begin(), experts.end());
        std::vector<placement> placed;
        l.pool.acquire(experts.data(), (int32_t) experts.size(), placed);
        for (const placement & p : placed) {
            l.evictions += p.evicted;
            if (p.miss) {
                l.n_copied++;
                l.pool.commit(p.slot);
            }
        }
        return failed;
    }

    void compare(const stream_stats & s) const {
        CHECK_EQ(s.tokens_decode.load(), tokens_decode);
        CHECK_EQ(s.tokens_prefill.load(), tokens_prefill);
        CHECK_EQ(s.read_errors.load(), read_errors);
        CHECK_EQ(s.layers.size(), layers.size());
        for (size_t i = 0; i < layers.size(); ++i) {
            const layer_model & l = *layers[i];
            const layer_stats & got = *s.layers[i];
            CHECK_EQ(got.hits.load(), l.hits);
            CHECK_EQ(got.misses.load(), l.misses);
            CHECK_EQ(got.evictions.load(), l.evictions);
            CHECK_EQ(got.bytes_needed.load(), (l.hits + l.misses) * l.expert_bytes);
            CHECK_EQ(got.bytes_read.load(), l.n_read * l.expert_bytes);
            CHECK_EQ(got.bytes_copied.load(), l.n_copied * l.expert_bytes);
        }
    }
};

static void maybe_sleep(test_random & rnd, uint32_t percent, int64_t us_max) {
    if (rnd.percent(percent)) {
        std::this_thread::sleep_for(std::chrono::microseconds(rnd.between(0, us_max)));
    }
}

struct fuzz_round {
    fake_experts   experts;
    place_source * source = nullptr; // owned by the stream's reader
    uint32_t       align  = 1;
    std::unique_ptr<stream> s;

    int32_t  n_used        = 1;
    uint32_t fault_percent = 0; // of the graphs
    uint32_t abort_percent = 0;
    bool     skewed        = false;

    // both touched only between compute_begin() and compute_end()
    stream_model model;
    bool         computing = false;

    fuzz_round(const std::vector<fake_layer_shape> & shapes, uint64_t seed, policy_kind kind) : experts(shapes, seed), model(experts.layers, kind) {}

    batch random_batch(test_random & rnd, int32_t n_expert, int64_t n_tokens) const {
        batch b(n_tokens);
        const uint32_t popular_percent = !skewed ? 0 : rnd.percent(30) ? 100 : 70;
        const int32_t  n_popular       = std::max(n_used, n_expert / 3);
        for (auto & token : b) {
            while ((int32_t) token.size() < n_used) {
                const int32_t e = (int32_t) rnd.below(rnd.percent(popular_percent) ? n_popular : n_expert);
                if (std::find(token.begin(), token.end(), e) == token.end()) {
                    token.push_back(e);
                }
            }
        }
        return b;
    }

    void choose_faults(test_random & rnd) {
        std::vector<bad_place> places;
        const bool any = rnd.percent(fault_percent);
        const uint32_t bad_percent = rnd.percent(50) ? 3 : 30;
        for (size_t i = 0; i < experts.layers.size(); ++i) {
            model.bad[i].clear();
            for (int32_t e = 0; any && e < experts.layers[i].n_expert; ++e) {
                if (!rnd.percent(bad_percent)) {
                    continue;
                }
                // a whole block of its own: the neighbour's aligned read never touches it
                const expert_part & p     = experts.layers[i].parts[rnd.below(experts.layers[i].parts.size())];
                const uint64_t      first = (p.offset + e * p.expert_bytes + align - 1) / align;
                const uint64_t      last  = (p.offset + (e + 1) * p.expert_bytes) / align;
                if (first < last) {
                    places.push_back({ p.file, (first + rnd.below(last - first)) * align, rnd.percent(70) ? -EIO : 0 });
                    model.bad[i].insert(e);
                }
            }
        }
        source->set_bad(places);
    }

    void run_graph(test_random & rnd, thread_team & team) {
        const int32_t n_layers = s->n_layers();
        s->compute_begin();
        CHECK(!computing);
        computing = true;
        model.compare(s->stats());
        model.error = false;
        choose_faults(rnd);

        const int64_t n_wide   = 5 * (int64_t) experts.layers[0].n_expert / n_used + 2;
        const int64_t n_tokens = rnd.percent(40) ? 1 : rnd.percent(40) ? rnd.between(2, 4) : rnd.between(1, n_wide);
        const int64_t n_out    = rnd.percent(50) ? rnd.between(1, n_tokens) : n_tokens; // the last layer computes what is asked for
        const int32_t i_abort  = rnd.percent(abort_percent) ? (int32_t) rnd.below(n_layers) : -1;
        const bool    in_begin = rnd.percent(60);

        const auto tokens_of = [&](int32_t i) { return i + 1 == n_layers ? n_out : n_tokens; };
        const auto is_staged = [&](int32_t i) {
            return !fits_slots(experts.layers[i].n_expert, experts.layers[i].n_slot, n_used, tokens_of(i));
        };

        bool complete = true;
        for (int32_t i = 0; i < n_layers && complete; ++i) {
            const batch     b      = random_batch(rnd, experts.layers[i].n_expert, tokens_of(i));
            const id_layout ids    = id_layout(b, rnd);
            const bool      staged = is_staged(i);
            std::vector<int32_t> ids_out(b.size() * n_used, -1);

            const auto     t_start      = std::chrono::steady_clock::now();
            const uint64_t stall_before = s->stats().layers[i]->stall_us;
            if (staged) {
                const bool read_next = i + 1 < n_layers && is_staged(i + 1) &&
                    touches_nearly_all(experts.layers[i + 1].n_expert, n_used, tokens_of(i + 1));
                n_staged_total++;
                n_ahead_total += read_next;
                model.begin_staging(i, b, read_next);
                s->begin_staging(i, ids.chosen, ids_out.data(), read_next);
            } else {
                model.begin_slots(i, b);
                s->begin_slots(i, ids.chosen, ids_out.data());
            }
            if (i == i_abort && in_begin) {
                complete = false;
                break;
            }
            maybe_sleep(rnd, 20, 100); // a shared FFN
            team.run([&](int32_t ith) {
                s->wait(i, staged, ith == 0);
                if (ith == 0) {
                    s->settle(i, staged);
                }
            });
            const uint64_t took_us = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - t_start).count();
            CHECK(s->stats().layers[i]->stall_us - stall_before <= took_us + 1);

            const std::set<int32_t> failed = staged ? model.settle_staging(i, b) : model.settle_slots(i);

            maybe_sleep(rnd, 10, 200); // what runs in the background may do its harm
            team.run([&](int32_t ith) {
                for (size_t row = ith; row < ids_out.size(); row += team.n) {
                    const int32_t e  = b[row / n_used][row % n_used];
                    const int32_t id = ids_out[row];
                    if (staged) {
                        CHECK_EQ(id, e);
                    } else if (failed.count(e) == 0) {
                        CHECK_EQ(id, model.layers[i]->pool.peek(e));
                    }
                    CHECK(id >= 0 && id < (staged ? experts.layers[i].n_expert : experts.layers[i].n_slot));
                    CHECK(failed.count(e) ? experts.is_zero(i, staged, id) : experts.holds(i, staged, id, e));
                }
            });
            complete = i != i_abort;
        }

        if (!complete) {
            for (int32_t i = 0; i < n_layers; ++i) {
                model.settle_slots(i);
            }
            for (auto & h : model.halves) {
                model.settle_half(h);
            }
        }
        const bool expect_error = model.error;
        n_graphs_total++;
        n_failed_total += expect_error;
        computing = false;
        const std::string error = s->compute_end(complete);
        CHECK_EQ(error, expect_error ? error : "");
        CHECK(!expect_error || error.find("file-") != std::string::npos);
    }
};

static void run_round(uint64_t seed) {
    set_check_context("round seed " + std::to_string(seed));
    test_random rnd(seed);
    const std::vector<policy_kind> kinds = all_policies();
    const policy_kind kind = kinds[rnd.below(kinds.size())];

    const uint32_t align    = rnd.percent(70) ? 1 : 512;
    const int32_t  n_layers = (int32_t) rnd.between(1, 5);
    std::vector<fake_layer_shape> shapes(n_layers);
    int32_t n_expert_min = INT32_MAX;
    const int32_t n_expert = (int32_t) rnd.between(2, 20);
    const bool    alike    = rnd.percent(50); // only then is the next layer often read ahead
    for (fake_layer_shape & shape : shapes) {
        shape.n_expert = alike ? n_expert : (int32_t) rnd.between(2, 20);
        shape.n_slot   = (int32_t) rnd.between(1, rnd.percent(60) ? (shape.n_expert + 1) / 2 : shape.n_expert);
        const int32_t n_part = (int32_t) rnd.between(1, 3);
        for (int32_t p = 0; p < n_part; ++p) {
            shape.part_bytes.push_back(rnd.between(16, align == 1 ? 400 : 2000));
        }
        n_expert_min = std::min(n_expert_min, shape.n_expert);
    }

    fuzz_round round(shapes, seed, kind);
    round.align         = align;
    round.n_used        = (int32_t) rnd.between(1, std::min(n_expert_min, 6));
    round.fault_percent = rnd.percent(40) ? 0 : 30;
    round.abort_percent = rnd.percent(50) ? 0 : 20;
    round.skewed        = rnd.percent(60);

    auto source = std::make_unique<place_source>(round.experts.contents, align, seed);
    round.source          = source.get();
    source->delay_percent = (uint32_t) (rnd.percent(40) ? 0 : rnd.percent(70) ? 5 : 40);
    source->short_percent = rnd.percent(50) ? 0 : 30;
    source->eintr_percent = rnd.percent(50) ? 0 : 10;
    const uint64_t chunk  = align == 1 ? rnd.between(50, 2000) : align * rnd.between(1, 4);
    auto io = std::make_unique<reader>(std::move(source), (int32_t) rnd.between(1, 3), chunk);

    stream::options opt;
    opt.policy     = kind;
    opt.poison     = true;
    opt.staging    = round.experts.staging.get();
    opt.half_bytes = round.experts.half_bytes;
    round.s = std::make_unique<stream>(opt, round.experts.layers, std::move(io));

    const int32_t n_graph = (int32_t) rnd.between(5, 30);
    const auto run_context = [&round, n_graph](uint64_t context_seed, int32_t n_thread) {
        test_random context_rnd(context_seed);
        thread_team team(n_thread);
        for (int32_t i = 0; i < n_graph; ++i) {
            round.run_graph(context_rnd, team);
        }
    };
    const int32_t n_thread = (int32_t) rnd.between(1, 3);
    if (rnd.percent(30)) {
        std::thread other(run_context, seed ^ 0x5555, 2);
        run_context(seed, n_thread);
        other.join();
    } else {
        run_context(seed, n_thread);
    }

    round.model.compare(round.s->stats());
    if (rnd.percent(50)) {
        round.s.reset(); // while the last copies are on their way
    }
}

int main(int argc, char ** argv) {
    signal(SIGABRT, on_abort);
    const fuzz_arguments args = parse_fuzz_arguments(argc, argv);
    const auto start = std::chrono::steady_clock::now();
    int64_t n_round = 0;
    do {
        run_round(args.seed + (uint64_t) n_round);
        n_round++;
    } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < args.limit_s);
    printf("ok: %lld rounds, %lld graphs (%lld with failed reads), %lld layers staged (%lld read ahead)\n", (long long) n_round,
        (long long) n_graphs_total, (long long) n_failed_total, (long long) n_staged_total, (long long) n_ahead_total);
    return 0;
}
