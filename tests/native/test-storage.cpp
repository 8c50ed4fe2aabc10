// Slots and staging in memory that the processor cannot reach: every byte goes through moe::storage, or the test crashes.

#include "check.h"
#include "fake-experts.h"
#include "stream.h"

#include <sys/mman.h>

#include <map>
#include <thread>

using namespace moe;

// hands out addresses that nobody may touch; the bytes are elsewhere
class far_memory final : public storage {
public:
    explicit far_memory(uint64_t size) : size(size), bytes(size, 0) {
        void * mem = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(mem != MAP_FAILED);
        first = (uint8_t *) mem;
    }

    ~far_memory() override { munmap(first, size); }

    void write(void * dst, const void * src, uint64_t n) const override { memcpy(near(dst, n), src, n); }
    void read (void * dst, const void * src, uint64_t n) const override { memcpy(dst, near(src, n), n); }
    void copy (void * dst, const void * src, uint64_t n) const override {
        n_copies.fetch_add(1);
        memcpy(near(dst, n), near(src, n), n);
    }
    void fill (void * dst, uint8_t value, uint64_t n) const override { memset(near(dst, n), value, n); }

    // at the end only: what says too early that it is done is seen to be wrong
    void write_begin(void * dst, const void * src, uint64_t n) const override {
        std::lock_guard<std::mutex> lock(mutex);
        begun[std::this_thread::get_id()].push_back({ dst, src, n });
    }
    void write_end() const override {
        std::vector<begun_write> mine;
        {
            std::lock_guard<std::mutex> lock(mutex);
            mine.swap(begun[std::this_thread::get_id()]);
        }
        n_most_begun = std::max(n_most_begun.load(), mine.size());
        for (const begun_write & w : mine) {
            write(w.dst, w.src, w.n);
        }
    }

    // where the bytes of an address are
    uint8_t * near(const void * p, uint64_t n) const {
        CHECK((const uint8_t *) p >= first && (const uint8_t *) p + n <= first + size);
        return bytes.data() + ((const uint8_t *) p - first);
    }

    uint8_t * take(uint64_t n) {
        used += n;
        CHECK(used <= size);
        return first + used - n;
    }

    mutable std::atomic<int32_t> n_copies { 0 };
    mutable std::atomic<size_t>  n_most_begun { 0 }; // at once, by one thread

private:
    struct begun_write {
        void *       dst;
        const void * src;
        uint64_t     n;
    };
    mutable std::mutex mutex;
    mutable std::map<std::thread::id, std::vector<begun_write>> begun;

    const uint64_t               size;
    mutable std::vector<uint8_t> bytes;
    uint8_t *                    first = nullptr;
    uint64_t                     used  = 0;
};

static constexpr uint64_t pad = 40;

// fake_experts whose slots and staging are far, and a stream over them
struct far_experts {
    fake_experts        experts;
    far_memory          far { 1 << 20 };
    place_source *      source = nullptr;
    std::vector<uint8_t> bounce;
    std::unique_ptr<stream> s;
    std::vector<int32_t> out = std::vector<int32_t>(64);
    test_random          rnd { 11 };

    // of layers that a device looks after
    device_mailbox       box = {};
    std::vector<int64_t> slab_of;
    std::vector<uint8_t> slabs;

    far_experts(const std::vector<fake_layer_shape> & shapes, uint32_t align, bool give_bounce, bool by_device = false) : experts(shapes, 5) {
        // behind the last expert of a tensor there is room for what kernels read too much
        uint64_t half_bytes = 0;
        for (layer_desc & d : experts.layers) {
            uint64_t pos = 0;
            for (expert_part & p : d.parts) {
                p.convert        = nullptr;
                p.slots          = far.take(p.expert_bytes * d.n_slot);
                p.staging_offset = pos;
                p.pad_bytes      = std::min(pad, p.expert_bytes);
                pos += p.expert_bytes * d.n_expert + pad;
            }
            half_bytes = std::max(half_bytes, pos);
        }
        uint8_t * staging = far.take(2 * half_bytes);
        for (layer_desc & d : experts.layers) {
            d.at        = &far;
            d.staging   = staging;
            d.by_device = by_device;
            slab_of.resize(slab_of.size() + d.n_expert);
        }
        auto owned = std::make_unique<place_source>(experts.contents, align, 4);
        source = owned.get();
        stream::options opt;
        opt.poison     = true;
        opt.check      = true;
        opt.half_bytes = half_bytes;
        if (by_device) {
            slabs.resize(1 << 20);
            opt.device.slabs   = slabs.data();
            opt.device.budget  = slabs.size();
            opt.device.box     = &box;
            opt.device.slab_of = slab_of.data();
            opt.device.poison  = true;
        }
        const uint64_t chunk = 4096;
        if (give_bounce) {
            bounce.resize(reader::bounce_bytes_for(*source, 6, chunk) + 4096);
        }
        uint8_t * area = give_bounce ? bounce.data() + 4096 - (uintptr_t) bounce.data() % 4096 : nullptr;
        auto io = std::make_unique<reader>(std::move(owned), 3, chunk, true, 2, area);
        CHECK(io->bounce_bytes() > 0);
        s = std::make_unique<stream>(opt, experts.layers, std::move(io));
    }

    const uint8_t * row(int32_t i, const expert_part & p, bool staged, int32_t id) const {
        const layer_desc & d = experts.layers[i];
        const uint8_t * first = staged ? d.staging + (i % 2) * half_bytes() + p.staging_offset : p.slots;
        return far.near(first + id * p.expert_bytes, p.expert_bytes);
    }

    uint64_t half_bytes() const {
        uint64_t n = 0;
        for (const layer_desc & d : experts.layers) {
            uint64_t pos = 0;
            for (const expert_part & p : d.parts) {
                pos += p.expert_bytes * d.n_expert + pad;
            }
            n = std::max(n, pos);
        }
        return n;
    }

    // what the layer computes with is what the file has
    void visit(int32_t i, bool staged, const std::vector<std::vector<int32_t>> & by_token, bool read_next = false, bool is_right = true) {
        const id_layout ids(by_token, rnd);
        if (staged) {
            s->begin_staging(i, ids.chosen, out.data(), read_next);
        } else {
            s->begin_slots(i, ids.chosen, out.data());
        }
        s->wait(i, staged, true);
        s->settle(i, staged);
        for (size_t t = 0; is_right && t < by_token.size(); ++t) {
            for (size_t k = 0; k < by_token[t].size(); ++k) {
                const int32_t e  = by_token[t][k];
                const int32_t id = out[t * by_token[t].size() + k];
                CHECK(!staged || id == e);
                for (const expert_part & p : experts.layers[i].parts) {
                    CHECK(experts.part_holds(i, p, row(i, p, staged, id), e, 0));
                }
            }
        }
    }

    void check_pads(int32_t i, int32_t expert) const {
        for (const expert_part & p : experts.layers[i].parts) {
            const uint8_t * behind = row(i, p, true, expert) + p.expert_bytes;
            CHECK(std::all_of(behind, behind + p.pad_bytes, [](uint8_t b) { return b == 0; }));
        }
    }
};

static const std::vector<fake_layer_shape> two_layers = { { 9, 4, { 300, 9000 } }, { 9, 4, { 70 } } };

TEST(slots_are_filled_evicted_and_checked_by_the_storage) {
    for (const uint32_t align : { 1u, 512u }) {
        for (const bool give_bounce : { false, true }) {
            far_experts f(two_layers, align, give_bounce);
            for (int32_t round = 0; round < 20; ++round) {
                f.s->compute_begin();
                const int32_t a = round / 2 % 9;
                f.visit(0, false, { { a, (a + 3) % 9 } });
                f.visit(1, false, { { (a + 1) % 9, (a + 5) % 9 }, { a, (a + 1) % 9 } });
                CHECK_EQ(f.s->compute_end(true), "");
            }
            CHECK(f.s->stats().layers[0]->evictions > 5u);
            CHECK(f.s->stats().layers[0]->hits > 0u);
        }
    }
}

TEST(staging_copies_within_the_storage_and_pads_what_is_not_there) {
    for (const uint32_t align : { 1u, 512u }) {
        far_experts f(two_layers, align, true);
        f.s->compute_begin();
        f.visit(0, true, { { 0, 1 }, { 4, 5 }, { 8, 5 } });
        f.check_pads(0, 1);
        f.check_pads(0, 5);
        f.check_pads(0, 8); // the last has room behind it
        f.visit(1, true, { { 2, 3 }, { 4, 6 }, { 7, 8 } });
        CHECK_EQ(f.s->compute_end(true), "");
        f.s->compute_begin();
        f.visit(0, false, { { 8, 5 } }); // the last token's
        f.visit(1, false, { { 7, 8 } });
        CHECK_EQ(f.s->compute_end(true), "");
        CHECK_EQ(f.s->stats().layers[0]->hits.load(), 2u);
        CHECK_EQ(f.s->stats().layers[1]->hits.load(), 2u);
        CHECK(f.far.n_copies >= 4 * 2 + 4);
        const int32_t n_before = f.far.n_copies;
        f.s->compute_begin();
        f.visit(0, true, { { 8, 5 }, { 4, 0 }, { 1, 2 } }, true); // some from slots; the next layer is read ahead
        f.visit(1, true, { { 0, 1 }, { 2, 3 }, { 4, 5 } });
        CHECK_EQ(f.s->compute_end(true), "");
        f.s->compute_begin();
        f.visit(0, false, { { 1, 2 } }); // waits for the copies of the last token's
        CHECK_EQ(f.s->compute_end(true), "");
        CHECK(f.far.n_copies > n_before);
    }
}

// what a kernel does when experts have no slab
static void ask(far_experts & f, int32_t i_layer, const std::vector<int32_t> & wanted) {
    std::copy(wanted.begin(), wanted.end(), f.box.experts);
    f.box.i_layer  = i_layer;
    f.box.n_expert = (int32_t) wanted.size();
    const uint32_t number = f.box.asked + 1;
    __atomic_store_n(&f.box.asked, number, __ATOMIC_RELEASE);
    while (__atomic_load_n(&f.box.answered, __ATOMIC_ACQUIRE) != number) {
        std::this_thread::yield();
    }
}

TEST(staging_takes_what_the_devices_tier_has_and_leaves_slots_alone) {
    for (const uint32_t align : { 1u, 512u }) {
        far_experts f(two_layers, align, true, true);
        f.s->compute_begin();
        ask(f, 0, { 4, 8 });
        CHECK_EQ(f.s->compute_end(true), "");
        CHECK(f.s->ram_bytes() > 0);
        const uint64_t n_read = f.s->stats().layers[0]->bytes_read;
        f.s->compute_begin();
        f.visit(0, true, { { 0, 1 }, { 4, 5 }, { 8, 5 } }, true);
        f.check_pads(0, 1);
        f.visit(1, true, { { 2, 3 }, { 4, 6 }, { 7, 8 } });
        CHECK_EQ(f.s->compute_end(true), "");
        const layer_stats & l = *f.s->stats().layers[0];
        CHECK_EQ(l.bytes_from_ram.load(), 2u * 9300);
        CHECK_EQ(l.bytes_read - n_read, 3u * 9300);
        CHECK_EQ(f.far.n_copies.load(), 0);
        for (int32_t slot = 0; slot < 4; ++slot) { // the device's own
            for (const expert_part & p : f.experts.layers[0].parts) {
                const uint8_t * bytes = f.row(0, p, false, slot);
                CHECK(std::all_of(bytes, bytes + p.expert_bytes, [](uint8_t b) { return b == 0; }));
            }
        }
    }
}

TEST(a_worker_begins_several_writes_before_it_waits) {
    far_experts f(two_layers, 1, true, true);
    f.s->compute_begin();
    ask(f, 0, { 0, 1, 2, 3, 4, 5, 6, 7, 8 });
    CHECK_EQ(f.s->compute_end(true), "");
    CHECK_EQ(f.far.n_most_begun.load(), 0u);
    f.s->compute_begin();
    f.visit(0, true, { { 0, 1 }, { 2, 3 }, { 4, 5 }, { 6, 7 }, { 8, 0 } });
    CHECK_EQ(f.s->compute_end(true), "");
    CHECK(f.far.n_most_begun.load() > 1 && f.far.n_most_begun.load() <= 8);
}

TEST(a_layer_of_a_device_can_be_filled_at_once) {
    far_experts f({ { 9, 9, { 300, 9000 } }, { 9, 4, { 70 } } }, 512, true, true);
    f.s->fill_all(0);
    for (int32_t e = 0; e < 9; ++e) {
        for (const expert_part & p : f.experts.layers[0].parts) {
            CHECK(f.experts.part_holds(0, p, f.row(0, p, false, e), e, 0));
        }
    }
    CHECK_EQ(f.s->stats().layers[0]->warm_filled.load(), 9u);
    const expert_part & p = f.experts.layers[0].parts[1];
    f.source->set_bad({ { p.file, p.offset + 3 * p.expert_bytes + 5000, -EIO } });
    try {
        f.s->fill_all(0);
        CHECK(false);
    } catch (const std::runtime_error & e) {
        CHECK_CONTAINS(e.what(), "file-");
    }
}

TEST(counters_of_a_device_become_statistics) {
    far_experts f(two_layers, 1, true, true);
    device_layer_state now = {};
    now.hits    = 10;
    now.misses  = 4;
    now.evictions = 2;
    now.asked   = 1;
    now.tokens  = 3;
    f.s->note_device_counters(0, now);
    now.hits       = 15; // two of them only because they had been guessed
    now.guesses    = 3;
    now.guess_hits = 2;
    now.misses     = 5;
    f.s->note_device_counters(0, now);
    const layer_stats & l = *f.s->stats().layers[0];
    CHECK_EQ(l.hits.load(), 13u);
    CHECK_EQ(l.misses.load(), 7u);
    CHECK_EQ(l.ram_hits.load(), 6u);
    CHECK_EQ(l.evictions.load(), 2u);
    CHECK_EQ(l.guesses.load(), 3u);
    CHECK_EQ(l.guess_hits.load(), 2u);
    CHECK_EQ(l.guess_wasted_bytes.load(), 9300u);
    CHECK_EQ(l.bytes_needed.load(), 20u * 9300);
    CHECK_EQ(l.bytes_from_ram.load(), (5u + 3u) * 9300);
    CHECK_EQ(f.s->stats().tokens_decode.load(), 3u);
}

TEST(a_failed_read_leaves_zeros_in_the_storage) {
    far_experts f(two_layers, 1, true);
    const expert_part & p = f.experts.layers[0].parts[1];
    f.source->set_bad({ { p.file, p.offset + 3 * p.expert_bytes + 5000, -EIO } });
    for (const bool staged : { false, true }) {
        f.s->compute_begin();
        f.visit(0, staged, staged ? std::vector<std::vector<int32_t>> { { 3, 2 }, { 1, 0 }, { 5, 6 } } : std::vector<std::vector<int32_t>> { { 3, 2 } }, false, false);
        CHECK(f.s->compute_end(true).find("failed at offset") != std::string::npos);
        const uint8_t * bytes = f.row(0, p, staged, staged ? 3 : f.out[0]);
        CHECK(std::all_of(bytes, bytes + p.expert_bytes, [](uint8_t b) { return b == 0; }));
    }
    f.source->set_bad({});
    f.s->compute_begin();
    f.visit(0, false, { { 3, 2 } });
    CHECK_EQ(f.s->compute_end(true), "");
}

TEST(a_slot_that_changed_in_the_storage_is_an_error) {
    far_experts f(two_layers, 1, true);
    f.s->compute_begin();
    f.visit(1, false, { { 3, 2 } });
    CHECK_EQ(f.s->compute_end(true), "");
    const expert_part & p = f.experts.layers[1].parts[0];
    *const_cast<uint8_t *>(f.row(1, p, false, f.out[0])) ^= 1;
    f.s->compute_begin();
    f.visit(1, false, { { 3, 2 } });
    CHECK(f.s->compute_end(true).find("changed while it held expert 3") != std::string::npos);
}

TEST(slots_in_a_storage_are_filled_beforehand) {
    far_experts f({ { 9, 4, { 300, 70 }, {}, { 6, 7, 8 } } }, 1, true);
    f.s->start_warm();
    CHECK(f.s->wait_warm(std::chrono::seconds(30)));
    f.s->compute_begin();
    f.visit(0, false, { { 6, 8 } });
    CHECK_EQ(f.s->compute_end(true), "");
    CHECK_EQ(f.s->stats().layers[0]->hits.load(), 2u);
}

int main(int argc, char ** argv) { return run_tests(argc, argv); }
