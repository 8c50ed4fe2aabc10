// Drives a moe::stream through random graphs, as hooks/ does, and a model of it that predicts every id, every failed
// read and every counter. After each join a team of threads compares the row behind every id with the file.
//
// What a round draws: layers of different shapes; batches from one token to wide, the last layer with fewer tokens; ids with
// strides, and ids that no router gives; reads that come short, late, interrupted or not at all; files that shrink, grow back and
// change their bytes between two layers; layers begun late, whose threads take each part of each expert and compare it at once; a ring in place of
// halves; a thread whose reads fail anywhere; slots that change behind the engine's back; graphs that
// stop after a begin, between wait and settle, or after a join; two contexts in turn; experts that stay; slots filled meanwhile; a RAM tier of
// any size; guesses, right and wrong.
//
// The seed fixes the calls of each context and the places that fail, not how threads and contexts interleave.
//
// usage: fuzz-stream [seed [seconds]]

#include "check.h"
#include "fake-experts.h"
#include "policies.h"
#include "stream.h"

#include <condition_variable>
#include <map>
#include <set>

using namespace moe;

static int64_t n_graphs_total = 0;
static int64_t n_failed_total = 0;
static int64_t n_ahead_total  = 0;
static int64_t n_staged_total = 0;
static int64_t n_late_total   = 0;
static int64_t n_ring_total   = 0;
static int64_t n_router_total = 0;
static int64_t n_slot_total   = 0;
static int64_t n_lost_total   = 0;
static int64_t n_warm_total   = 0;
static int64_t n_ram_total    = 0;
static int64_t n_guess_total  = 0;

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
        int32_t   n_free_slot; // for experts that are not kept
        uint64_t  expert_bytes;
        slot_pool pool;
        std::vector<placement> reading; // misses between begin and join
        std::vector<uint32_t>  version; // [n_slot] of the bytes that the slot was given
        std::set<int32_t>      changed; // slots that changed since
        uint64_t  hits = 0, misses = 0, evictions = 0, n_read = 0, n_copied = 0;

        layer_model(const layer_desc & d, policy_kind kind)
            : n_slot(d.n_slot), n_free_slot(d.n_free_slot()), expert_bytes(d.expert_bytes()), pool(d.n_slot, d.n_expert, kind), version(d.n_slot) {
            for (const int32_t e : d.kept) {
                pool.keep(e);
            }
        }
    };

    struct half_model {
        int32_t                     i_layer = -1;
        std::map<int32_t, uint32_t> there;   // rows that hold their expert, or will, and of which version
        std::set<int32_t>           reading; // of those: on their way from the file
        std::set<int32_t>           wanted;  // by the layer that has begun
    };

    std::vector<std::unique_ptr<layer_model>> layers;
    half_model halves[2];
    std::set<int32_t> ring; // of the layer begun last: what passes through it
    std::vector<std::set<int32_t>> bad;  // [layer]: experts that cannot be read
    std::vector<std::set<int32_t>> lost; // [layer]: experts whose read failed for another reason, until they are settled
    const std::vector<std::vector<uint32_t>> & versions; // of the bytes in the files
    bool        check;                   // as options::check
    std::string error;                   // a part of the text of the running graph's first one
    uint64_t tokens_decode = 0, tokens_prefill = 0, read_errors = 0;

    stream_model(const fake_experts & experts, policy_kind kind, bool check)
        : bad(experts.layers.size()), lost(experts.layers.size()), versions(experts.versions), check(check) {
        for (const layer_desc & d : experts.layers) {
            layers.push_back(std::make_unique<layer_model>(d, kind));
        }
    }

    half_model & half_of(int32_t i_layer) { return halves[i_layer & 1]; }

    void note(const std::string & what) { error = error.empty() ? what : error; }

    // nothing is on its way from a file: what is read from here on finds the files as they are then
    bool reads_nothing() const {
        return halves[0].reading.empty() && halves[1].reading.empty() &&
            std::all_of(layers.begin(), layers.end(), [](const auto & l) { return l->reading.empty(); });
    }

    bool comes(int32_t i_layer, int32_t expert) const { return bad[i_layer].count(expert) == 0 && lost[i_layer].count(expert) == 0; }

    void use_slot(int32_t i_layer, int32_t expert) {
        layer_model & l = *layers[i_layer];
        const int32_t slot = l.pool.peek(expert);
        if (check && slot >= 0 && l.changed.erase(slot)) {
            note("slot " + std::to_string(slot) + " changed while it held expert " + std::to_string(expert));
            n_slot_total++;
            l.pool.drop(slot);
        }
    }

    // a batch with ids that no router gives
    void begin_nonsense(int32_t i_layer, bool staged) {
        note("the router chose");
        if (staged) {
            fill(i_layer, {});
        }
    }

    void begin_slots(int32_t i_layer, const batch & b) {
        layer_model & l = *layers[i_layer];
        const std::vector<int32_t> experts = distinct_of(b);
        for (const int32_t e : experts) {
            use_slot(i_layer, e);
        }
        std::vector<placement> placed;
        l.pool.acquire(experts.data(), (int32_t) experts.size(), placed);
        for (const placement & p : placed) {
            (p.miss ? l.misses : l.hits) += 1;
            l.n_read    += p.miss;
            l.evictions += p.evicted;
            if (p.miss) {
                l.reading.push_back(p);
                l.version[p.slot] = versions[i_layer][p.expert];
                l.changed.erase(p.slot);
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
            if (h.there.count(e)) {
                continue;
            }
            use_slot(i_layer, e);
            const int32_t slot = l.pool.peek(e);
            h.there[e] = slot >= 0 ? l.version[slot] : versions[i_layer][e];
            if (slot >= 0) {
                l.n_copied++;
            } else {
                l.n_read++;
                h.reading.insert(e);
            }
        }
    }

    void begin_staging(int32_t i_layer, const batch & b, bool read_next) {
        layer_model & l = *layers[i_layer];
        const std::vector<int32_t> experts = distinct_of(b);
        fill(i_layer, experts);
        for (const int32_t e : experts) {
            (l.pool.peek(e) >= 0 ? l.hits : l.misses) += 1;
        }
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

    // what has a slot stays there, the last tokens' experts get one, the others pass through the ring
    void begin_ring(int32_t i_layer, const batch & b) {
        layer_model & l = *layers[i_layer];
        const std::vector<int32_t> experts = distinct_of(b);
        for (const int32_t e : experts) {
            use_slot(i_layer, e);
        }
        for (const int32_t e : experts) {
            (l.pool.peek(e) >= 0 ? l.hits : l.misses) += 1;
        }
        std::vector<placement> placed;
        const std::vector<int32_t> last = last_of(l, b);
        l.pool.acquire(last.data(), (int32_t) last.size(), placed);
        for (const placement & p : placed) {
            l.evictions += p.evicted;
            if (p.miss) {
                l.reading.push_back(p);
                l.version[p.slot] = versions[i_layer][p.expert];
                l.changed.erase(p.slot);
            }
        }
        ring.clear();
        for (const int32_t e : experts) {
            const bool in_place = l.pool.peek(e) >= 0;
            l.n_read += !in_place;
            if (!in_place && std::none_of(l.reading.begin(), l.reading.end(), [e](const placement & p) { return p.expert == e; })) {
                ring.insert(e);
            }
        }
        if (i_layer == 0) {
            tokens_prefill += b.size();
        }
    }

    uint32_t version_in_ring(int32_t i_layer, int32_t e) const {
        const int32_t slot = layers[i_layer]->pool.peek(e);
        return slot >= 0 ? layers[i_layer]->version[slot] : versions[i_layer][e];
    }

    std::set<int32_t> settle_ring(int32_t i_layer) {
        std::set<int32_t> failed = settle_slots(i_layer);
        for (const int32_t e : ring) {
            if (!comes(i_layer, e)) {
                failed.insert(e);
                read_errors++;
                note("file-");
            }
        }
        ring.clear();
        return failed;
    }

    // the experts of the last tokens, the newest last, as many as there are slots
    static std::vector<int32_t> last_of(const layer_model & l, const batch & b) {
        std::vector<int32_t> experts = distinct_of(batch(b.rbegin(), b.rend()));
        experts.resize(std::min(experts.size(), (size_t) l.n_free_slot));
        std::reverse(experts.begin(), experts.end());
        return experts;
    }

    // the experts of the batch that come out as zeros
    std::set<int32_t> settle_slots(int32_t i_layer) {
        layer_model & l = *layers[i_layer];
        std::set<int32_t> failed;
        for (const placement & p : l.reading) {
            if (!comes(i_layer, p.expert)) {
                l.pool.fail(p.slot);
                failed.insert(p.expert);
            } else {
                l.pool.commit(p.slot);
            }
        }
        if (!l.reading.empty()) {
            lost[i_layer].clear();
        }
        l.reading.clear();
        read_errors += failed.size();
        if (!failed.empty()) {
            note("file-");
        }
        return failed;
    }

    std::set<int32_t> settle_half(half_model & h) {
        std::set<int32_t> failed;
        for (const int32_t e : h.reading) {
            if (comes(h.i_layer, e)) {
                continue;
            }
            failed.insert(e);
            h.there.erase(e);
            if (h.wanted.count(e)) { // what was only read ahead, nobody misses
                note("file-");
            }
        }
        if (!h.reading.empty()) {
            lost[h.i_layer].clear();
        }
        h.reading.clear();
        h.wanted.clear();
        read_errors += failed.size();
        return failed;
    }

    std::set<int32_t> settle_staging(int32_t i_layer, const batch & b) {
        half_model & h = half_of(i_layer);
        const std::set<int32_t> failed = settle_half(h);
        if (!error.empty()) {
            return failed;
        }
        // the last tokens' experts go to the slots, so that the newest is the last that the policy gives up
        layer_model & l = *layers[i_layer];
        const std::vector<int32_t> experts = last_of(l, b);
        std::vector<placement> placed;
        l.pool.acquire(experts.data(), (int32_t) experts.size(), placed);
        for (const placement & p : placed) {
            l.evictions += p.evicted;
            if (p.miss) {
                l.n_copied++;
                l.pool.commit(p.slot);
                l.version[p.slot] = h.there.at(p.expert);
                l.changed.erase(p.slot);
            }
        }
        return failed;
    }

    void compare(const stream_stats & s, bool loose, bool has_ram, bool guesses) const {
        CHECK_EQ(s.tokens_decode.load(), tokens_decode);
        CHECK_EQ(s.tokens_prefill.load(), tokens_prefill);
        if (!loose && !guesses) {
            CHECK_EQ(s.read_errors.load(), read_errors);
        }
        CHECK_EQ(s.layers.size(), layers.size());
        for (size_t i = 0; i < layers.size(); ++i) {
            const layer_model & l = *layers[i];
            const layer_stats & got = *s.layers[i];
            CHECK_EQ(got.hits + got.misses, l.hits + l.misses);
            CHECK_EQ(got.bytes_needed.load(), (l.hits + l.misses) * l.expert_bytes);
            if (loose) {
                CHECK(got.warm_filled * l.expert_bytes <= got.warm_bytes);
                continue;
            }
            CHECK_EQ(got.warm_bytes.load(), 0u);
            CHECK_EQ(got.pins.load(), (uint64_t) l.pool.n_kept());
            CHECK_EQ(got.hits.load(), l.hits);
            CHECK_EQ(got.misses.load(), l.misses);
            CHECK_EQ(got.evictions.load(), l.evictions);
            if (has_ram) {
                CHECK_EQ(got.bytes_read + got.bytes_copied + got.bytes_from_ram, (l.n_read + l.n_copied) * l.expert_bytes);
                CHECK(got.ram_hits <= got.misses && got.bytes_to_ram <= got.evictions * l.expert_bytes);
            } else {
                CHECK_EQ(got.bytes_read.load(), l.n_read * l.expert_bytes);
                CHECK_EQ(got.bytes_copied.load(), l.n_copied * l.expert_bytes);
            }
            CHECK(got.guess_hits <= got.guesses && (guesses || got.guesses == 0));
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
    std::vector<uint8_t> ram_memory;   // empty: no RAM tier
    std::vector<uint8_t> guess_memory; // empty: nothing is guessed
    std::unique_ptr<stream> s;

    int32_t  n_used        = 1;
    uint32_t fault_percent = 0; // of the graphs
    uint32_t abort_percent = 0;
    uint32_t router_percent = 0; // of the layers
    uint32_t slot_percent   = 0; // of the layers that went through slots
    uint32_t midway_percent = 0; // of the layers: faults change before it
    uint32_t late_percent   = 0; // of the layers
    int32_t  n_ring         = 0; // entries; 0: halves
    std::vector<uint8_t> ring_memory;
    bool     skewed        = false;
    bool     warm          = false; // slots are filled meanwhile, so that nobody can say what is a hit

    // bytes outlive their slot, or are read beforehand: files and faults stay as they are
    // hits cannot be predicted: slots are filled meanwhile, or become empty in another order
    bool is_loose() const { return warm || (!guess_memory.empty() && fault_percent > 0); }

    bool is_fixed() const { return warm || !ram_memory.empty() || !guess_memory.empty(); }

    // both touched only between compute_begin() and compute_end()
    stream_model model;
    bool         computing = false;

    fuzz_round(const std::vector<fake_layer_shape> & shapes, uint64_t seed, policy_kind kind, bool check)
        : experts(shapes, seed), model(experts, kind, check) {}

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

    // one id becomes one that no router gives
    void spoil(test_random & rnd, batch & b, int32_t n_expert) const {
        std::vector<int32_t> & token = b[rnd.below(b.size())];
        const size_t  k        = rnd.below(token.size());
        const int32_t values[] = { -1, n_expert, INT32_MIN, INT32_MAX, n_expert + (int32_t) rnd.below(100), token[k == 0 ? token.size() - 1 : 0] };
        token[k] = values[rnd.below(token.size() > 1 ? 6 : 5)];
    }

    uint32_t version_of(int32_t i_layer, bool staged, int32_t id, int32_t expert) {
        return staged ? model.half_of(i_layer).there.at(expert) : is_fixed() ? experts.versions[i_layer][expert] : model.layers[i_layer]->version[id];
    }

    // whose reads the sick thread lost since the last call
    void learn_lost() {
        for (const bad_place & p : source->take_lost()) {
            for (size_t i = 0; i < experts.layers.size(); ++i) {
                for (const expert_part & part : experts.layers[i].parts) {
                    const uint64_t end = part.offset + part.expert_bytes * experts.layers[i].n_expert;
                    if (part.file == p.file && p.offset >= part.offset && p.offset < end) {
                        model.lost[i].insert((int32_t) ((p.offset - part.offset) / part.expert_bytes));
                        n_lost_total++;
                    }
                }
            }
        }
    }

    // while nothing is read
    void choose_faults(test_random & rnd) {
        std::vector<bad_place> places;
        for (size_t i = 0; i < experts.layers.size() && rnd.percent(fault_percent); ++i) {
            experts.replace((int32_t) i, (int32_t) rnd.below(experts.layers[i].n_expert));
        }
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
                    const int64_t results[] = { -EIO, -EAGAIN, 0 };
                    places.push_back({ p.file, (first + rnd.below(last - first)) * align, results[rnd.below(3)] });
                    model.bad[i].insert(e);
                }
            }
        }
        source->set_bad(places);

        for (int32_t file = 0; file < fake_experts::n_file; ++file) {
            const uint64_t size = experts.contents[file].size();
            const uint64_t end  = any && rnd.percent(20) ? size - rnd.below(size / 4 + 1) : size;
            source->truncate(file, end);
            for (size_t i = 0; i < experts.layers.size(); ++i) {
                for (const expert_part & p : experts.layers[i].parts) {
                    for (int32_t e = 0; p.file == file && e < experts.layers[i].n_expert; ++e) {
                        if (p.offset + (e + 1) * p.expert_bytes > end) {
                            model.bad[i].insert(e);
                        }
                    }
                }
            }
        }
    }

    // a bit of a ready slot, while no copy into the layer's slots runs
    void spoil_slot(test_random & rnd, int32_t i_layer) {
        auto &        l    = *model.layers[i_layer];
        const int32_t slot = (int32_t) rnd.below(l.n_slot);
        if (l.pool.state(slot) == slot_state::ready && l.changed.insert(slot).second) {
            const auto &        parts = experts.layers[i_layer].parts;
            const expert_part & p     = parts[rnd.below(parts.size())];
            p.slots[slot * p.expert_bytes + rnd.below(p.expert_bytes)] ^= 1 << rnd.below(8);
        }
    }

    void compare() const { model.compare(s->stats(), is_loose(), !ram_memory.empty(), !guess_memory.empty()); }

    void run_graph(test_random & rnd, thread_team & team) {
        const int32_t n_layers = s->n_layers();
        s->compute_begin();
        CHECK(!computing);
        computing = true;
        compare();
        model.error.clear();
        if (!is_fixed()) {
            choose_faults(rnd);
        }

        const int64_t n_wide   = 5 * (int64_t) experts.layers[0].n_expert / n_used + 2;
        const int64_t n_tokens = rnd.percent(40) ? 1 : rnd.percent(40) ? rnd.between(2, 4) : rnd.between(1, n_wide);
        const int64_t n_out    = rnd.percent(50) ? rnd.between(1, n_tokens) : n_tokens; // the last layer computes what is asked for
        const int32_t i_abort  = rnd.percent(abort_percent) ? (int32_t) rnd.below(n_layers) : -1;
        const int32_t abort_at = (int32_t) rnd.below(3); // 0: begun; 1: some threads waited; 2: joined

        const auto tokens_of = [&](int32_t i) { return i + 1 == n_layers ? n_out : n_tokens; };
        const auto is_staged = [&](int32_t i) {
            return !fits_slots(experts.layers[i].n_expert, experts.layers[i].n_free_slot(), n_used, tokens_of(i));
        };

        const bool any_may_fail = fault_percent > 0 || source->sick_percent > 0;
        bool complete = true;
        batch next = random_batch(rnd, experts.layers[0].n_expert, tokens_of(0));
        for (int32_t i = 0; i < n_layers && complete; ++i) {
            if (rnd.percent(midway_percent) && model.reads_nothing()) {
                choose_faults(rnd);
            }
            batch b = std::move(next);
            if (i + 1 < n_layers) {
                next = random_batch(rnd, experts.layers[i + 1].n_expert, tokens_of(i + 1));
            }
            const bool nonsense = rnd.percent(router_percent);
            if (nonsense) {
                spoil(rnd, b, experts.layers[i].n_expert);
                n_router_total++;
            }
            const id_layout ids    = id_layout(b, rnd);
            const bool      staged = is_staged(i);
            const bool      ringed = staged && n_ring > 0;
            const bool      late   = rnd.percent(late_percent) || ringed;
            std::vector<int32_t> ids_out(b.size() * n_used, -1);

            const auto     t_start      = std::chrono::steady_clock::now();
            const uint64_t stall_before = s->stats().layers[i]->stall_us;
            if (staged) {
                const bool read_next = i + 1 < n_layers && is_staged(i + 1) &&
                    touches_nearly_all(experts.layers[i + 1].n_expert, n_used, tokens_of(i + 1));
                n_staged_total++;
                n_ring_total  += ringed;
                n_ahead_total += read_next && !ringed;
                if (nonsense) {
                    model.begin_nonsense(i, staged && !ringed);
                } else if (ringed) {
                    model.begin_ring(i, b);
                } else {
                    model.begin_staging(i, b, read_next);
                }
                s->begin_staging(i, ids.chosen, ids_out.data(), read_next, late);
            } else {
                if (nonsense) {
                    model.begin_nonsense(i, staged);
                } else {
                    model.begin_slots(i, b);
                }
                s->begin_slots(i, ids.chosen, ids_out.data(), late);
            }
            if (i == i_abort && abort_at == 0) {
                complete = false;
                break;
            }
            maybe_sleep(rnd, 20, 100); // a shared FFN
            if (!guess_memory.empty() && i + 1 < n_layers && !is_staged(i + 1) && rnd.percent(80)) {
                std::vector<int32_t> guessed;
                for (const int32_t e : distinct_of(next)) {
                    guessed.push_back(rnd.percent(60) ? e : (int32_t) rnd.below(experts.layers[i + 1].n_expert));
                }
                s->guess(i + 1, guessed.data(), (int32_t) guessed.size());
            }
            // whoever takes the last bytes of a staged layer settles it, unless a read failed: such a layer stops before
            const bool settles = i != i_abort || (abort_at == 2 && !(late && staged));
            const std::vector<int32_t> order = s->order();
            CHECK(late || order.empty());
            n_late_total += !order.empty();
            const auto expert_behind = [&](int32_t id) {
                const size_t k = std::find(ids_out.begin(), ids_out.end(), id) - ids_out.begin();
                return b.at(k / n_used).at(k % n_used);
            };
            team.run([&](int32_t ith) {
                const size_t n_part = experts.layers[i].parts.size();
                for (size_t p = 0; late && p < (settles ? n_part : n_part - 1); ++p) {
                    for (size_t step = 0; step < order.size(); ++step) {
                        const uint8_t * bytes  = s->take(i, staged, (int32_t) p, (int32_t) step, ith, team.n);
                        const int32_t  e       = expert_behind(order[step]);
                        const uint32_t version = is_fixed() ? experts.versions[i][e] : ringed ? model.version_in_ring(i, e) : version_of(i, staged, order[step], e);
                        if (is_fixed() ? model.bad[i].count(e) == 0 : !any_may_fail) {
                            CHECK(experts.part_holds(i, experts.layers[i].parts[p], bytes, e, version));
                        }
                    }
                }
                if (late) {
                    return;
                }
                if (settles || ith % 2 == 0) {
                    s->wait(i, staged, ith == 0);
                }
                if (settles && ith == 0) {
                    s->settle(i, staged);
                }
            });
            if (!settles) {
                complete = false;
                break;
            }
            const uint64_t took_us = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - t_start).count();
            CHECK(s->stats().layers[i]->stall_us - stall_before <= took_us + 1);

            learn_lost();
            const std::set<int32_t> failed = ringed ? model.settle_ring(i) : staged ? model.settle_staging(i, b) : model.settle_slots(i);

            maybe_sleep(rnd, 10, 200); // what runs in the background may do its harm
            team.run([&](int32_t ith) {
                for (size_t row = ith; row < ids_out.size(); row += team.n) {
                    const int32_t e  = b[row / n_used][row % n_used];
                    const int32_t id = ids_out[row];
                    CHECK(id >= 0 && id < (staged ? experts.layers[i].n_expert : experts.layers[i].n_slot));
                    if (nonsense) { // rows that differ within a token, and defined bytes
                        const auto * token = &ids_out[row / n_used * n_used];
                        CHECK(std::count(token, token + n_used, id) == 1 || (ringed && experts.layers[i].n_slot < n_used));
                        CHECK(!experts.is_poison(i, staged && !ringed, id));
                        continue;
                    }
                    if (ringed) { // seen when it was taken
                        CHECK_EQ(id, e);
                        continue;
                    }
                    if (staged) {
                        CHECK_EQ(id, e);
                    } else if (failed.count(e) == 0 && !is_loose()) {
                        CHECK_EQ(id, model.layers[i]->pool.peek(e));
                    }
                    if (!guess_memory.empty() && std::find(order.begin(), order.end(), id) != order.end()) {
                        continue; // may be on its way from an entry; it was seen when it was taken
                    }
                    if (failed.count(e)) {
                        CHECK(late || experts.is_zero(i, staged, id)); // late: only what is missing of it
                    } else {
                        CHECK(experts.holds(i, staged, id, e, version_of(i, staged, id, e)));
                    }
                }
            });
            if (!staged && !late && rnd.percent(slot_percent)) {
                spoil_slot(rnd, i);
            }
            complete = i != i_abort;
        }

        if (!complete) {
            if (source->sick_percent > 0) { // to know which reads were lost while it is our turn
                for (int32_t i = 0; i < n_layers; ++i) {
                    s->wait(i, false, false);
                    s->wait(i, true, false);
                }
                learn_lost();
            }
            for (int32_t i = 0; i < n_layers; ++i) {
                model.settle_slots(i);
            }
            for (auto & h : model.halves) {
                model.settle_half(h);
            }
            model.ring.clear(); // nobody asks what of it failed
        }
        const std::string expected = model.error;
        n_graphs_total++;
        n_failed_total += !expected.empty();
        computing = false;
        const std::string error = s->compute_end(complete);
        CHECK_EQ(error.empty(), expected.empty());
        CHECK_CONTAINS(error, expected);
    }
};

static void run_round(uint64_t seed) {
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
        const auto some_experts = [&](int64_t n) {
            std::vector<int32_t> out;
            while ((int64_t) out.size() < n) {
                const int32_t e = (int32_t) rnd.below(shape.n_expert);
                if (std::find(out.begin(), out.end(), e) == out.end()) {
                    out.push_back(e);
                }
            }
            return out;
        };
        shape.kept = some_experts(rnd.percent(60) ? 0 : rnd.between(0, shape.n_slot));
        shape.warm = some_experts(rnd.between(0, shape.n_expert));
    }

    const bool check = rnd.percent(50);
    fuzz_round round(shapes, seed, kind, check);
    round.align         = align;
    round.n_used        = (int32_t) rnd.between(1, std::min(n_expert_min, 6));
    round.fault_percent = rnd.percent(40) ? 0 : 30;
    round.abort_percent = rnd.percent(50) ? 0 : 20;
    round.router_percent = rnd.percent(70) ? 0 : 5;
    round.slot_percent   = check && rnd.percent(50) ? 20 : 0; // unchecked, nobody would know
    round.midway_percent = rnd.percent(50) ? 0 : 20;
    round.skewed        = rnd.percent(60);
    round.warm          = rnd.percent(35);
    const auto room_for = [&](const layer_desc & d) {
        uint64_t n = 0;
        for (const expert_part & p : d.parts) {
            n += (p.expert_bytes + 63) / 64 * 64;
        }
        return n;
    };
    uint64_t entry_bytes = 0;
    uint64_t all_bytes   = 0;
    for (const layer_desc & d : round.experts.layers) {
        entry_bytes = std::max(entry_bytes, room_for(d));
        all_bytes  += room_for(d) * d.n_expert;
    }
    round.ram_memory.resize(rnd.percent(60) ? 0 : rnd.between(1, rnd.percent(50) ? all_bytes : all_bytes / 8 + 1));
    round.guess_memory.resize(rnd.percent(60) ? 0 : rnd.between(1, 8) * entry_bytes);
    if (round.is_fixed()) {
        round.slot_percent   = 0;
        round.midway_percent = 0;
    }
    round.late_percent  = rnd.percent(40) ? 0 : rnd.percent(50) ? 50 : 100;

    auto source = std::make_unique<place_source>(round.experts.contents, align, seed);
    round.source          = source.get();
    source->delay_percent = (uint32_t) (rnd.percent(40) ? 0 : rnd.percent(70) ? 5 : 40);
    source->short_percent = rnd.percent(50) ? 0 : 30;
    source->eintr_percent = rnd.percent(50) ? 0 : 10;
    round.n_ring          = rnd.percent(70) ? 0 : (int32_t) rnd.between(2, 12);
    source->sick_percent  = align == 1 && !round.is_fixed() && round.n_ring == 0 && rnd.percent(20) ? 5 : 0;
    const uint64_t chunk  = align == 1 ? rnd.between(50, 2000) : align * rnd.between(1, 4);
    auto io = std::make_unique<reader>(std::move(source), (int32_t) rnd.between(1, 3), chunk, true, (int32_t) rnd.between(1, 4));

    stream::options opt;
    opt.policy     = kind;
    opt.poison     = true;
    opt.check      = check;
    opt.staging    = round.experts.staging.get();
    opt.half_bytes = round.experts.half_bytes;
    if (round.n_ring > 0) {
        for (const layer_desc & d : round.experts.layers) {
            for (const expert_part & p : d.parts) {
                opt.ring_bytes = std::max(opt.ring_bytes, p.expert_bytes);
            }
        }
        round.ring_memory.resize(round.n_ring * opt.ring_bytes);
        opt.staging = round.ring_memory.data();
        opt.n_ring  = round.n_ring;
    }
    opt.ram         = round.ram_memory.empty() ? nullptr : round.ram_memory.data();
    opt.ram_bytes   = round.ram_memory.size();
    opt.guesses     = round.guess_memory.empty() ? nullptr : round.guess_memory.data();
    opt.guess_bytes = entry_bytes;
    opt.n_guess     = (int32_t) (round.guess_memory.size() / entry_bytes);
    round.s = std::make_unique<stream>(opt, round.experts.layers, std::move(io));

    if (round.is_fixed()) {
        round.choose_faults(rnd);
    }
    if (round.warm) {
        round.s->start_warm();
        maybe_sleep(rnd, 50, 500);
    }

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

    if (round.warm && rnd.percent(50)) {
        CHECK(round.s->wait_warm(std::chrono::seconds(50))); // nobody computes
        for (const auto & l : round.s->stats().layers) {
            n_warm_total += (int64_t) l->warm_filled;
        }
    }
    round.compare();
    for (const auto & l : round.s->stats().layers) {
        n_ram_total   += (int64_t) l->ram_hits;
        n_guess_total += (int64_t) l->guess_hits;
    }
    if (rnd.percent(50)) {
        round.s.reset(); // while the last copies are on their way
    }
}

int main(int argc, char ** argv) {
    return run_fuzzer(argc, argv, run_round, [] {
        std::ostringstream o;
        o << ", " << n_graphs_total << " graphs (" << n_failed_total << " with errors), " << n_staged_total << " layers staged ("
          << n_ahead_total << " read ahead), " << n_late_total << " taken in parts, " << n_ring_total << " through a ring, " << n_router_total << " bad routers, " << n_lost_total << " lost reads, " << n_slot_total
          << " changed slots, " << n_warm_total << " warm fills, " << n_ram_total << " RAM hits, " << n_guess_total << " right guesses";
        return o.str();
    });
}
