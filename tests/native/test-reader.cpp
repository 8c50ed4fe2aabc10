#include "check.h"
#include "faulty-source.h"
#include "reader.h"
#include "real-file.h"
#include "uring.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include <fcntl.h>
#include <sys/stat.h>

using namespace moe;

static constexpr uint64_t KiB = 1024;

// Compiled twice (CMakeLists.txt): workers with one read under way each, that sleep in it, and workers with several, from files through
// io_uring.
#ifndef MOE_TEST_DEPTH
#define MOE_TEST_DEPTH 1
#endif
static constexpr int32_t    test_depth   = MOE_TEST_DEPTH;
static constexpr io_backend test_backend = test_depth > 1 ? io_backend::uring : io_backend::threads;

static void sleep_ms(int32_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// a flag that threads wait for
class latch {
public:
    void open() {
        { std::lock_guard<std::mutex> lock(mutex); is_open = true; }
        changed.notify_all();
    }

    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return is_open; });
    }

private:
    std::mutex              mutex;
    std::condition_variable changed;
    bool                    is_open = false;
};

static transfer read_of(int32_t tag, uint64_t offset, guarded_buffer & to, int32_t file = 0) {
    return { tag, file, offset, to.size, to.data(), nullptr };
}

// a reader over one file in memory; the source stays visible for its log
struct memory_fixture {
    explicit memory_fixture(uint64_t size, uint32_t align, int32_t n_threads, uint64_t chunk_size, faulty_source::hook_fn hook = nullptr,
            bool converts = false, int32_t depth = test_depth)
        : text(random_bytes(size, 42)) {
        auto owned = std::make_unique<faulty_source>(std::vector<std::string> { text }, align, std::move(hook));
        source = owned.get();
        r = std::make_unique<reader>(std::move(owned), n_threads, chunk_size, converts, depth);
    }

    std::string             text;
    faulty_source *         source; // owned by r
    std::unique_ptr<reader> r;
};

//
// memory source: what is read
//

TEST(io_mode_names_round_trip) {
    for (io_mode mode : { io_mode::automatic, io_mode::direct, io_mode::buffered }) {
        io_mode back = mode == io_mode::direct ? io_mode::buffered : io_mode::direct;
        CHECK(io_mode_from_name(io_mode_name(mode), back));
        CHECK(back == mode);
    }
    io_mode mode = io_mode::direct;
    CHECK(!io_mode_from_name("mmap", mode));
    CHECK(mode == io_mode::direct);
}

TEST(io_backend_names_round_trip) {
    for (io_backend backend : { io_backend::automatic, io_backend::threads, io_backend::uring }) {
        io_backend back = backend == io_backend::uring ? io_backend::threads : io_backend::uring;
        CHECK(io_backend_from_name(io_backend_name(backend), back));
        CHECK(back == backend);
    }
    io_backend backend = io_backend::uring;
    CHECK(!io_backend_from_name("aio", backend));
    CHECK(backend == io_backend::uring);
}

TEST(reads_any_offset_and_size) {
    for (uint32_t align : { 1u, 512u, 4096u }) {
        memory_fixture f(100 * KiB + 77, align, 2, 8 * KiB);
        const uint64_t offsets[] = { 0, 1, 511, 512, 4095, 4096, 4097, 8191, 8192, 8193, 50000 };
        const uint64_t sizes[]   = { 1, 2, 511, 513, 4096, 4097, 8192, 8193, 20000, 40000 };
        for (uint64_t offset : offsets) {
            for (uint64_t size : sizes) {
                guarded_buffer to(size, offset % 3);
                transfer_group group;
                f.r->submit(group, { read_of(1, offset, to) }, urgency::demand);
                CHECK(group.wait());
                CHECK(to.holds(f.text.data() + offset));
            }
        }
        // up to the very end, where a direct read gets less than the block it asks for
        guarded_buffer to(5000);
        transfer_group group;
        f.r->submit(group, { read_of(1, f.text.size() - 5000, to) }, urgency::demand);
        CHECK(group.wait());
        CHECK(to.holds(f.text.data() + f.text.size() - 5000));
    }
}

TEST(large_reads_are_cut_evenly_between_blocks) {
    for (uint32_t align : { 1u, 512u, 4096u }) {
        const uint64_t chunk = 16 * KiB;
        memory_fixture f(200 * KiB, align, 3, chunk);
        const uint64_t offset = 5 * KiB + 3;
        guarded_buffer to(100 * KiB + 1);
        transfer_group group;
        f.r->submit(group, { read_of(1, offset, to) }, urgency::demand);
        CHECK(group.wait());
        CHECK(to.holds(f.text.data() + offset));

        std::vector<read_record> log = f.source->log();
        std::sort(log.begin(), log.end(), [](const read_record & a, const read_record & b) { return a.offset < b.offset; });
        CHECK(log.size() >= 7 && log.size() <= 9); // 100 KiB by 16 KiB; blocks make pieces smaller
        uint64_t pos = offset / align * align;
        for (const read_record & r : log) {
            CHECK_EQ(r.offset, pos); // no gap and no overlap
            CHECK(r.size <= chunk + 2 * align);
            CHECK(r.size >= 8 * KiB);
            pos = r.offset + r.size;
        }
        const uint64_t end = offset + to.size;
        CHECK_EQ(pos, (end + align - 1) / align * align);
        CHECK_EQ(f.r->bytes_read(), pos - offset / align * align);
    }
}

TEST(a_read_of_one_chunk_is_not_cut) {
    for (uint32_t align : { 1u, 4096u }) {
        memory_fixture f(100 * KiB, align, 3, 16 * KiB);
        guarded_buffer to(16 * KiB);
        transfer_group group;
        f.r->submit(group, { read_of(1, 9 * KiB + 5, to) }, urgency::demand);
        CHECK(group.wait());
        CHECK(to.holds(f.text.data() + 9 * KiB + 5));
        CHECK_EQ(f.source->log().size(), 1u);
    }
}

TEST(converts_in_whole_units_whatever_comes_back) {
    for (uint32_t align : { 1u, 512u, 4096u }) {
        for (uint64_t unit : { 1u, 7u, 100u, 1000u, 4096u, 8192u }) {
            // at most 1,500 bytes come back at a time: pieces have to be gathered before they are converted
            memory_fixture f(200 * KiB, align, 3, 8 * KiB, [](int32_t, uint64_t size, uint64_t) -> int64_t {
                return (int64_t) std::min<uint64_t>(size, 1500);
            }, true);
            const backwards convert(unit);
            for (uint64_t offset : { 0u, 1u, 4095u, 5000u }) {
                for (uint64_t n : { 1u, 2u, 9u, 20u }) {
                    guarded_buffer to(n * unit, offset % 3);
                    transfer t = read_of(1, offset, to);
                    t.convert = &convert;
                    transfer_group group;
                    f.r->submit(group, { t }, urgency::demand);
                    CHECK(group.wait() || align == 4096); // a direct read that never fills a block gives up
                    CHECK(!group.ok() || to.holds(convert.of(f.text.substr(offset, to.size)).data()));
                    CHECK(to.guards_intact());
                }
            }
        }
    }
}

TEST(what_comes_from_memory_is_converted_already) {
    memory_fixture f(1000, 1, 1, 8 * KiB, nullptr, true);
    const backwards convert(10);
    guarded_buffer to(100);
    transfer_group group;
    f.r->submit(group, { { 1, 0, 0, 100, to.data(), f.text.data(), &convert } }, urgency::demand);
    CHECK(group.wait());
    CHECK(to.holds(f.text.data()));
}

TEST(nothing_is_converted_of_a_read_that_fails) {
    memory_fixture f(1000, 1, 1, 8 * KiB, [](int32_t, uint64_t, uint64_t) -> int64_t { return -EIO; }, true);
    const backwards convert(10);
    guarded_buffer to(100);
    const std::string before(to.data(), to.data() + 100);
    transfer t = read_of(1, 0, to);
    t.convert = &convert;
    transfer_group group;
    f.r->submit(group, { t }, urgency::demand);
    CHECK(!group.wait());
    CHECK(to.holds(before.data()));
}

TEST(several_workers_share_one_read) {
    // each chunk waits until all four are being read at once
    std::mutex mutex;
    std::condition_variable changed;
    int32_t n_inside = 0;
    memory_fixture f(64 * KiB, 1, 4, 16 * KiB, [&](int32_t, uint64_t size, uint64_t) -> int64_t {
        std::unique_lock<std::mutex> lock(mutex);
        n_inside++;
        changed.notify_all();
        // system_clock: this wait is one that ThreadSanitizer of gcc 12 understands
        const auto limit = std::chrono::system_clock::now() + std::chrono::seconds(20);
        CHECK(changed.wait_until(lock, limit, [&] { return n_inside == 4; }));
        return (int64_t) size;
    }, false, 1);
    CHECK_EQ(f.r->n_threads(), 4);
    guarded_buffer to(64 * KiB);
    transfer_group group;
    f.r->submit(group, { read_of(1, 0, to) }, urgency::demand);
    CHECK(group.wait());
    CHECK(to.holds(f.text.data()));
}

TEST(copies_from_memory) {
    memory_fixture f(4 * KiB, 4096, 2, 4 * KiB);
    const std::string from = random_bytes(100 * KiB + 5, 7);
    guarded_buffer copied(from.size() - 3, 1);
    guarded_buffer from_file(1000);
    transfer_group group;
    // file and offset mean nothing here
    f.r->submit(group, { { 1, 99, ~0ull, copied.size, copied.data(), from.data() + 3 }, read_of(2, 10, from_file) }, urgency::demand);
    CHECK(group.wait());
    CHECK(copied.holds(from.data() + 3));
    CHECK(from_file.holds(f.text.data() + 10));
    CHECK_EQ(f.r->bytes_read(), 4 * KiB); // the copy is not counted
}

TEST(nothing_to_do_is_done_at_once) {
    memory_fixture f(4 * KiB, 1, 1, 4 * KiB);
    transfer_group group;
    CHECK(group.idle());
    CHECK(group.wait());
    f.r->submit(group, {}, urgency::demand);
    char c = 'x';
    f.r->submit(group, { { 1, 0, 10, 0, &c, nullptr }, { 2, 0, ~0ull, 0, &c, nullptr }, { 3, 0, 0, 0, &c, &c } }, urgency::demand);
    CHECK(group.idle());
    CHECK(group.wait());
    CHECK_EQ(c, 'x');
    CHECK_EQ(f.source->log().size(), 0u);
}

TEST(bounce_bytes_are_told) {
    memory_fixture buffered(4 * KiB, 1, 3, 8 * KiB);
    CHECK_EQ(buffered.r->bounce_bytes(), 0u);
    memory_fixture direct(4 * KiB, 4096, 3, 8 * KiB);
    CHECK_EQ(direct.r->bounce_bytes(), 3 * test_depth * (8 * KiB + 2 * 4096));
}

TEST(impossible_settings_abort) {
    const auto make = [](int32_t n_threads, uint64_t chunk_size) {
        reader r(std::make_unique<faulty_source>(std::vector<std::string> { "abc" }, 4096), n_threads, chunk_size);
    };
    CHECK_ABORTS("threads", make(0, 8192));
    CHECK_ABORTS("chunk size", make(1, 0));
    CHECK_ABORTS("chunk size", make(1, 5000));
    CHECK_ABORTS("alignment 4096", make(1, 512)); // a chunk smaller than a block
}

TEST(an_alignment_beyond_a_page) {
    memory_fixture f(200 * KiB, 64 * KiB, 2, 64 * KiB); // the source checks the buffer's
    guarded_buffer to(100 * KiB, 3);
    transfer_group group;
    f.r->submit(group, { read_of(1, 40 * KiB + 1, to) }, urgency::demand);
    CHECK(group.wait());
    CHECK(to.holds(f.text.data() + 40 * KiB + 1));
}

//
// memory source: faults
//

TEST(short_reads_are_continued) {
    for (uint32_t align : { 1u, 512u, 4096u }) {
        std::mutex mutex;
        test_random rnd(5);
        // one worker: the same reads each time, for a direct read gives up after a long row of short ones
        memory_fixture f(64 * KiB + 100, align, 1, 16 * KiB, [&](int32_t, uint64_t size, uint64_t) -> int64_t {
            std::lock_guard<std::mutex> lock(mutex);
            return rnd.percent(30) ? (int64_t) size : rnd.between(1, (int64_t) size); // also no multiple of the alignment
        });
        for (int32_t round = 0; round < 100; ++round) {
            uint64_t offset;
            uint64_t size;
            {
                std::lock_guard<std::mutex> lock(mutex);
                offset = rnd.below(60 * KiB);
                size   = rnd.between(1, (int64_t) std::min<uint64_t>(f.text.size() - offset, 20 * KiB));
            }
            guarded_buffer to(size);
            transfer_group group;
            f.r->submit(group, { read_of(1, offset, to) }, urgency::demand);
            CHECK(group.wait());
            CHECK(to.holds(f.text.data() + offset));
        }
    }
}

TEST(a_short_read_before_the_wanted_byte_is_not_an_end) {
    // a direct read starts in front of the wanted bytes and may stop before it reaches them
    int32_t n_read = 0;
    memory_fixture f(16 * KiB, 4096, 1, 16 * KiB, [&](int32_t, uint64_t size, uint64_t) -> int64_t {
        return n_read++ < 3 ? 512 : (int64_t) size;
    });
    guarded_buffer to(100);
    transfer_group group;
    f.r->submit(group, { read_of(1, 3000, to) }, urgency::demand);
    CHECK(group.wait());
    CHECK(to.holds(f.text.data() + 3000));
}

TEST(reads_that_never_get_there_fail) {
    memory_fixture f(16 * KiB, 4096, 1, 16 * KiB, [](int32_t, uint64_t, uint64_t) -> int64_t { return 512; });
    guarded_buffer to(100);
    transfer_group group;
    f.r->submit(group, { read_of(1, 3000, to) }, urgency::demand);
    CHECK(!group.wait());
    CHECK_CONTAINS(group.error(), "offset 3000");
    CHECK(to.guards_intact());
}

TEST(one_byte_at_a_time) {
    memory_fixture f(300, 1, 2, 128, [](int32_t, uint64_t, uint64_t) -> int64_t { return 1; });
    guarded_buffer to(290);
    transfer_group group;
    f.r->submit(group, { read_of(1, 3, to) }, urgency::demand);
    CHECK(group.wait());
    CHECK(to.holds(f.text.data() + 3));
    CHECK_EQ(f.r->bytes_read(), 290u);
}

TEST(interrupted_reads_are_repeated) {
    std::atomic<int32_t> n_read { 0 };
    memory_fixture f(64 * KiB, 4096, 2, 8 * KiB, [&](int32_t, uint64_t size, uint64_t) -> int64_t {
        return ++n_read % 3 ? -EINTR : (int64_t) size;
    });
    guarded_buffer to(50 * KiB);
    transfer_group group;
    f.r->submit(group, { read_of(1, 5, to) }, urgency::demand);
    CHECK(group.wait());
    CHECK(to.holds(f.text.data() + 5));
}

TEST(an_error_names_operation_file_offset_and_length) {
    for (uint32_t align : { 1u, 4096u }) {
        memory_fixture f(64 * KiB, align, 1, 64 * KiB, [](int32_t, uint64_t, uint64_t) -> int64_t { return -EIO; });
        guarded_buffer to(777);
        transfer_group group;
        f.r->submit(group, { read_of(31, 12345, to) }, urgency::demand);
        CHECK(!group.wait());
        CHECK_EQ(group.failed_tags().size(), 1u);
        CHECK_EQ(group.failed_tags()[0], 31);
        CHECK_CONTAINS(group.error(), "reading 777 bytes");
        CHECK_CONTAINS(group.error(), "at offset 12345");
        CHECK_CONTAINS(group.error(), "'file-0.gguf'");
        CHECK_CONTAINS(group.error(), strerror(EIO));
        CHECK_EQ(f.source->log().size(), 1u); // no retry
        CHECK(to.guards_intact());
    }
}

TEST(the_first_of_several_errors_is_told) {
    // one worker: the reads come in their order
    memory_fixture f(64 * KiB, 1, 1, 4 * KiB, [](int32_t, uint64_t size, uint64_t offset) -> int64_t {
        return offset < 8 * KiB ? (int64_t) size : offset < 12 * KiB ? -EIO : -EBADF;
    }, false, 1);
    guarded_buffer a(20 * KiB), b(KiB);
    transfer_group group;
    f.r->submit(group, { read_of(1, 0, a), read_of(2, 40 * KiB, b) }, urgency::demand);
    CHECK(!group.wait());
    CHECK_CONTAINS(group.error(), "at offset 8192 of");
    CHECK_CONTAINS(group.error(), strerror(EIO));
}

TEST(only_an_interruption_is_tried_again) {
    // EAGAIN too: the descriptors block, so it would not go away
    for (const int error : { EAGAIN, EIO, ENOMEM, EINVAL, EBADF }) {
        memory_fixture f(4 * KiB, 1, 1, 4 * KiB, [error](int32_t, uint64_t, uint64_t) -> int64_t { return -error; });
        guarded_buffer to(100);
        transfer_group group;
        f.r->submit(group, { read_of(1, 0, to) }, urgency::demand);
        CHECK(!group.wait());
        CHECK_CONTAINS(group.error(), strerror(error));
        CHECK_EQ(f.source->log().size(), 1u);
    }
}

TEST(offsets_beyond_every_file_fail) {
    const uint64_t max = INT64_MAX;
    const std::pair<uint64_t, uint64_t> beyond[] = {
        { max, 1 }, { max - 5, 6 + 4096 }, { max + 1, 1 }, { ~0ull, 1 }, { ~0ull - 99, 200 }, { ~0ull, ~0ull }, { 5, ~0ull }, { 0, max + 1 },
    };
    for (uint32_t align : { 1u, 4096u }) {
        memory_fixture f(64 * KiB, align, 2, 8 * KiB);
        for (const auto & [offset, size] : beyond) {
            char c = 'x';
            guarded_buffer other(100);
            transfer_group group;
            f.r->submit(group, { { 1, 0, offset, size, &c, nullptr }, read_of(2, 10, other) }, urgency::demand);
            CHECK(!group.wait());
            CHECK(group.has_failed(1) && !group.has_failed(2));
            CHECK_CONTAINS(group.error(), "offset " + std::to_string(offset));
            CHECK_EQ(c, 'x');
            CHECK(other.holds(f.text.data() + 10));
        }
        CHECK_EQ(f.source->log().size(), std::size(beyond)); // only the others were asked for
    }
}

TEST(an_error_midway_names_where) {
    int32_t n_read = 0;
    memory_fixture f(64 * KiB, 1, 1, 64 * KiB, [&](int32_t, uint64_t, uint64_t) -> int64_t { return n_read++ == 0 ? 500 : -EIO; });
    guarded_buffer to(777);
    transfer_group group;
    f.r->submit(group, { read_of(1, 1000, to) }, urgency::demand);
    CHECK(!group.wait());
    CHECK_CONTAINS(group.error(), "at offset 1000 ");
    CHECK_CONTAINS(group.error(), "failed at offset 1500");
}

TEST(the_end_of_the_file_is_an_error) {
    for (uint32_t align : { 1u, 4096u }) {
        memory_fixture f(10000, align, 2, 4 * KiB);
        for (uint64_t offset : { 9000u, 9999u, 10000u, 12287u, 12288u, 50000u }) {
            guarded_buffer to(2000);
            transfer_group group;
            f.r->submit(group, { read_of(3, offset, to) }, urgency::demand);
            CHECK(!group.wait());
            CHECK_EQ(group.failed_tags()[0], 3);
            CHECK_CONTAINS(group.error(), "truncated");
            CHECK_CONTAINS(group.error(), "'file-0.gguf'");
            CHECK(to.guards_intact());
        }
        guarded_buffer to(1000);
        transfer_group group;
        f.r->submit(group, { read_of(3, 9000, to) }, urgency::demand);
        CHECK(group.wait());
        CHECK(to.holds(f.text.data() + 9000));
    }
}

TEST(one_failure_leaves_the_others_alone) {
    memory_fixture f(64 * KiB, 1, 3, 4 * KiB, [](int32_t, uint64_t size, uint64_t offset) -> int64_t {
        return offset / (4 * KiB) == 5 ? -EIO : (int64_t) size;
    });
    std::vector<std::unique_ptr<guarded_buffer>> to;
    std::vector<transfer> transfers;
    for (int32_t i = 0; i < 16; ++i) {
        to.push_back(std::make_unique<guarded_buffer>(4 * KiB));
        transfers.push_back(read_of(100 + i, i * 4 * KiB, *to[i]));
    }
    transfer_group group;
    f.r->submit(group, transfers, urgency::demand);
    CHECK(!group.wait());
    CHECK_EQ(group.failed_tags().size(), 1u);
    CHECK_EQ(group.failed_tags()[0], 105);
    for (int32_t i = 0; i < 16; ++i) {
        CHECK(i == 5 || to[i]->holds(f.text.data() + i * 4 * KiB));
    }
}

TEST(a_failed_tag_is_reported_once) {
    // one expert is several transfers, each of several chunks: the caller gives up its slot once
    memory_fixture f(64 * KiB, 1, 2, 4 * KiB, [](int32_t, uint64_t, uint64_t) -> int64_t { return -EIO; });
    guarded_buffer a(20 * KiB);
    guarded_buffer b(20 * KiB);
    guarded_buffer c(1);
    transfer_group group;
    f.r->submit(group, { read_of(7, 0, a), read_of(7, 30 * KiB, b), read_of(8, 0, c) }, urgency::demand);
    CHECK(!group.wait());
    std::vector<int32_t> tags = group.failed_tags();
    std::sort(tags.begin(), tags.end());
    CHECK(tags == std::vector<int32_t>({ 7, 8 }));
}

TEST(a_group_is_used_again) {
    std::atomic<bool> broken { false };
    memory_fixture f(64 * KiB, 1, 2, 4 * KiB, [&](int32_t, uint64_t size, uint64_t) -> int64_t { return broken ? -EIO : (int64_t) size; });
    transfer_group group;
    for (int32_t round = 0; round < 50; ++round) {
        broken = round % 3 == 1;
        guarded_buffer to(10 * KiB);
        f.r->submit(group, { read_of(round, round * 100, to) }, urgency::demand);
        CHECK_EQ(group.wait(), !broken);
        CHECK(group.idle());
        if (broken) {
            CHECK_EQ(group.failed_tags()[0], round);
            CHECK(!group.wait()); // remembered until clear()
            group.clear();
            CHECK(group.failed_tags().empty() && group.error().empty());
            CHECK(group.wait());
        } else {
            CHECK(to.holds(f.text.data() + round * 100));
            CHECK(group.failed_tags().empty() && group.error().empty());
        }
    }
}

TEST(one_group_takes_several_submissions) {
    latch go;
    memory_fixture f(64 * KiB, 1, 2, 4 * KiB, [&](int32_t, uint64_t size, uint64_t) -> int64_t { go.wait(); return (int64_t) size; });
    guarded_buffer a(9 * KiB);
    guarded_buffer b(9 * KiB);
    transfer_group group;
    f.r->submit(group, { read_of(1, 0, a) }, urgency::demand);
    f.r->submit(group, { read_of(2, 20 * KiB, b) }, urgency::background);
    CHECK(!group.idle());
    go.open();
    CHECK(group.wait());
    CHECK(a.holds(f.text.data()));
    CHECK(b.holds(f.text.data() + 20 * KiB));
}

//
// memory source: order and threads
//

TEST(demand_goes_before_background) {
    latch begun;
    latch go;
    memory_fixture f(64 * KiB, 1, 1, 4 * KiB, [&](int32_t, uint64_t size, uint64_t) -> int64_t { begun.open(); go.wait(); return (int64_t) size; },
        false, 1);

    guarded_buffer plug(1), late(3 * KiB), early(3 * KiB), more(3 * KiB), guess(9 * KiB);
    transfer_group group_plug, group_background, group_demand;
    f.r->submit(group_plug, { read_of(0, 60 * KiB, plug) }, urgency::demand);
    begun.wait(); // the only worker is busy: everything else queues up
    f.r->submit(group_background, { read_of(1, 0, late), read_of(2, 20 * KiB, guess) }, urgency::background);
    f.r->submit(group_demand, { read_of(3, 4 * KiB, early) }, urgency::demand);
    f.r->submit(group_demand, { read_of(4, 8 * KiB, more) }, urgency::demand);
    go.open();
    CHECK(group_demand.wait());
    CHECK(group_background.wait());
    CHECK(group_plug.wait());

    std::vector<uint64_t> offsets;
    for (const read_record & r : f.source->log()) {
        offsets.push_back(r.offset / KiB);
    }
    // within one urgency: first come, first served
    CHECK(offsets == std::vector<uint64_t>({ 60, 4, 8, 0, 20, 23, 26 }));
}

TEST(what_somebody_waits_for_leaves_the_background) {
    latch begun;
    latch go;
    memory_fixture f(64 * KiB, 1, 1, 4 * KiB, [&](int32_t, uint64_t size, uint64_t) -> int64_t { begun.open(); go.wait(); return (int64_t) size; },
        false, 1);

    guarded_buffer plug(1), first(KiB), wanted(9 * KiB), demand(KiB), second(KiB);
    transfer_group group_plug, group_background, group_wanted, group_demand;
    f.r->submit(group_plug, { read_of(0, 60 * KiB, plug) }, urgency::demand);
    begun.wait();
    f.r->submit(group_background, { read_of(1, 0, first) }, urgency::background);
    f.r->submit(group_wanted, { read_of(2, 20 * KiB, wanted) }, urgency::background);
    f.r->submit(group_background, { read_of(3, 8 * KiB, second) }, urgency::background);
    f.r->submit(group_demand, { read_of(4, 12 * KiB, demand) }, urgency::demand);
    f.r->promote(group_wanted);
    f.r->promote(group_wanted); // nothing left to promote
    f.r->promote(group_demand); // was never there
    go.open();
    for (transfer_group * g : { &group_plug, &group_background, &group_wanted, &group_demand }) {
        CHECK(g->wait());
    }
    std::vector<uint64_t> offsets;
    for (const read_record & r : f.source->log()) {
        offsets.push_back(r.offset / KiB);
    }
    CHECK(offsets == std::vector<uint64_t>({ 60, 20, 23, 26, 12, 0, 8 }));
    CHECK(first.holds(f.text.data()) && wanted.holds(f.text.data() + 20 * KiB));
    CHECK(second.holds(f.text.data() + 8 * KiB) && demand.holds(f.text.data() + 12 * KiB));
}

TEST(reordered_completions_keep_their_bytes) {
    std::mutex mutex;
    test_random rnd(6);
    memory_fixture f(256 * KiB, 4096, 6, 4 * KiB, [&](int32_t, uint64_t size, uint64_t) -> int64_t {
        int32_t us;
        {
            std::lock_guard<std::mutex> lock(mutex);
            us = (int32_t) rnd.below(500);
        }
        std::this_thread::sleep_for(std::chrono::microseconds(us));
        return (int64_t) size;
    });
    for (int32_t round = 0; round < 5; ++round) {
        std::vector<std::unique_ptr<guarded_buffer>> to;
        std::vector<transfer> transfers;
        for (int32_t i = 0; i < 20; ++i) {
            to.push_back(std::make_unique<guarded_buffer>(5000 + 17 * i, i % 5));
            transfers.push_back(read_of(i, 11003 * i + round, *to[i]));
        }
        transfer_group group;
        f.r->submit(group, transfers, urgency::demand);
        CHECK(group.wait());
        for (int32_t i = 0; i < 20; ++i) {
            CHECK(to[i]->holds(f.text.data() + 11003 * i + round));
        }
    }
}

TEST(wait_sleeps_until_the_last_byte) {
    memory_fixture f(64 * KiB, 1, 2, 4 * KiB, [](int32_t, uint64_t size, uint64_t offset) -> int64_t {
        if (offset == 12 * KiB) {
            sleep_ms(50);
        }
        return (int64_t) size;
    });
    guarded_buffer to(64 * KiB);
    transfer_group group;
    f.r->submit(group, { read_of(1, 0, to) }, urgency::demand);
    CHECK(group.wait());
    CHECK(to.holds(f.text.data()));
}

TEST(groups_of_several_threads_do_not_mix) {
    memory_fixture f(256 * KiB, 4096, 4, 8 * KiB, [](int32_t, uint64_t size, uint64_t offset) -> int64_t {
        return offset < 168 * KiB && offset + size > 160 * KiB ? -EIO : (int64_t) size; // 160 KiB .. 168 KiB are broken
    });
    std::vector<std::thread> threads;
    for (int32_t t = 0; t < 4; ++t) {
        threads.emplace_back([&f, t] {
            test_random rnd(100 + t);
            transfer_group reused;
            for (int32_t round = 0; round < 150; ++round) {
                transfer_group fresh; // destroyed as soon as wait() returns
                transfer_group & group = round % 2 ? reused : fresh;
                std::vector<std::unique_ptr<guarded_buffer>> to;
                std::vector<transfer> transfers;
                std::vector<int32_t>  broken;
                for (int32_t i = 0; i < 4; ++i) {
                    const uint64_t offset = rnd.below(230 * KiB);
                    to.push_back(std::make_unique<guarded_buffer>(rnd.between(1, 20 * KiB), rnd.below(8)));
                    transfers.push_back(read_of(1000 * t + i, offset, *to[i]));
                    if (offset < 168 * KiB && offset + to[i]->size > 160 * KiB) {
                        broken.push_back(1000 * t + i);
                    }
                }
                f.r->submit(group, transfers, rnd.percent(30) ? urgency::background : urgency::demand);
                CHECK_EQ(group.wait(), broken.empty());
                std::vector<int32_t> failed = group.failed_tags();
                std::sort(failed.begin(), failed.end());
                CHECK(failed == broken);
                for (int32_t i = 0; i < 4; ++i) {
                    if (std::find(broken.begin(), broken.end(), 1000 * t + i) == broken.end()) {
                        CHECK(to[i]->holds(f.text.data() + transfers[i].offset));
                    } else {
                        CHECK(to[i]->guards_intact());
                    }
                }
                group.clear();
            }
        });
    }
    for (std::thread & t : threads) {
        t.join();
    }
}

TEST(a_group_may_go_as_soon_as_it_is_idle) {
    // polled, not waited for: the worker may still be about to wake sleepers
    memory_fixture f(4 * KiB, 1, 2, 4 * KiB);
    char c[2];
    for (int32_t round = 0; round < 3000; ++round) {
        auto group = std::make_unique<transfer_group>();
        f.r->submit(*group, { { 1, 0, 5, 1, c, nullptr }, { 1, 0, 6, 1, c + 1, nullptr } }, urgency::demand);
        while (!group->idle()) {
            std::this_thread::yield();
        }
        CHECK(group->failed_tags().empty());
        CHECK(c[0] == f.text[5] && c[1] == f.text[6]); // seen without a lock
        c[0] = c[1] = 0;
        group.reset();
    }
}

TEST(a_group_that_goes_first_waits_for_its_transfers) {
    // an exception between submit() and wait() must not leave workers writing into what is gone
    memory_fixture f(64 * KiB, 1, 1, 4 * KiB, [](int32_t, uint64_t size, uint64_t) -> int64_t { sleep_ms(5); return (int64_t) size; });
    guarded_buffer to(20 * KiB);
    {
        transfer_group group;
        f.r->submit(group, { read_of(1, 0, to) }, urgency::demand);
    }
    CHECK(to.holds(f.text.data()));
}

TEST(two_threads_wait_for_one_group) {
    memory_fixture f(64 * KiB, 1, 1, 4 * KiB, [](int32_t, uint64_t size, uint64_t) -> int64_t { sleep_ms(2); return (int64_t) size; });
    guarded_buffer to(64 * KiB);
    transfer_group group;
    f.r->submit(group, { read_of(1, 0, to) }, urgency::demand);
    std::thread other([&] { CHECK(group.wait()); CHECK(to.holds(f.text.data())); });
    CHECK(group.wait());
    CHECK(to.holds(f.text.data()));
    other.join();
}

TEST(destruction_ends_what_has_not_begun) {
    for (urgency how : { urgency::demand, urgency::background }) {
        memory_fixture f(256 * KiB, 1, 2, 4 * KiB, [](int32_t, uint64_t size, uint64_t) -> int64_t { sleep_ms(20); return (int64_t) size; });
        std::vector<std::unique_ptr<guarded_buffer>> to;
        std::vector<transfer> transfers;
        for (int32_t i = 0; i < 60; ++i) {
            to.push_back(std::make_unique<guarded_buffer>(4 * KiB));
            transfers.push_back(read_of(i, i * 4 * KiB, *to[i]));
        }
        transfer_group group;
        f.r->submit(group, transfers, how);
        std::thread waiter([&] { CHECK(!group.wait()); });
        f.r.reset();
        waiter.join();
        CHECK(group.idle());
        // had it read on to the end, nothing would have failed (it would have taken 0.6 s)
        CHECK(group.failed_tags().size() > 0);
        CHECK_CONTAINS(group.error(), "the reader was stopped");
        CHECK_CONTAINS(group.error(), "reading 4096 bytes at offset ");
        CHECK_CONTAINS(group.error(), "'file-0.gguf'");
        for (int32_t i = 0; i < 60; ++i) {
            const auto & failed = group.failed_tags();
            const bool stopped = std::find(failed.begin(), failed.end(), i) != failed.end();
            const std::string untouched(4 * KiB, (char) 0xa5);
            CHECK(to[i]->holds(stopped ? untouched.data() : f.text.data() + i * 4 * KiB));
        }
    }
}

TEST(destruction_names_a_copy_too) {
    latch begun;
    auto source = std::make_unique<faulty_source>(std::vector<std::string> { "abcd" }, 1, [&](int32_t, uint64_t size, uint64_t) -> int64_t {
        begun.open();
        sleep_ms(200);
        return (int64_t) size;
    });
    auto r = std::make_unique<reader>(std::move(source), 1, 4 * KiB);
    char a = 0;
    char b = 0;
    transfer_group plug, group;
    r->submit(plug, { { 0, 0, 2, 1, &a, nullptr } }, urgency::demand);
    begun.wait();
    r->submit(group, { { 5, 0, 0, 1, &b, "x" } }, urgency::background);
    r.reset();
    CHECK(plug.wait());
    CHECK_EQ(a, 'c');
    CHECK(!group.wait());
    CHECK_EQ(group.failed_tags()[0], 5);
    CHECK_CONTAINS(group.error(), "copying 1 bytes");
    CHECK_CONTAINS(group.error(), "the reader was stopped");
    CHECK_EQ(b, 0);
}

TEST(an_unused_reader_ends) {
    for (int32_t i = 0; i < 50; ++i) {
        memory_fixture f(4 * KiB, 4096, 3, 4 * KiB);
    }
}

//
// real files
//

static std::unique_ptr<file_source> open_source(const std::vector<open_file> & files, io_mode mode) {
    std::string error;
    if (test_backend == io_backend::uring && !uring_works(error)) {
        skip_test(error);
    }
    auto source = make_file_source(files, mode, error, test_backend);
    if (!source) {
        check_failed(__FILE__, __LINE__, error);
    }
    CHECK(error.empty());
    return source;
}

static void read_real_files(io_mode mode) {
    const std::string text_a = random_bytes(300 * KiB + 123, 8); // no multiple of a block
    const std::string text_b = random_bytes(5000, 9);
    const std::string text_c = random_bytes(100, 10);            // less than a block
    auto a = std::make_unique<real_file>(text_a);
    auto b = std::make_unique<real_file>(text_b);
    auto c = std::make_unique<real_file>(text_c);
    if (mode == io_mode::direct) {
        skip_without_direct_reads(*a);
    }
    auto source = open_source({ { a->fd, "a.gguf" }, { b->fd, "b.gguf" }, { c->fd, "c.gguf" } }, mode);
    CHECK_EQ(source->alignment(), mode == io_mode::direct ? 4096u : 1u);
    CHECK_EQ(source->name(1), "b.gguf");
    a.reset(); // descriptors are borrowed: from here on only the source's own are open
    b.reset();
    c.reset();

    const std::string * texts[] = { &text_a, &text_b, &text_c };
    reader r(std::move(source), 3, 16 * KiB, false, test_depth);
    test_random rnd(11);
    for (int32_t round = 0; round < 60; ++round) {
        std::vector<std::unique_ptr<guarded_buffer>> to;
        std::vector<transfer> transfers;
        for (int32_t i = 0; i < 6; ++i) {
            const int32_t       file = (int32_t) rnd.below(3);
            const std::string & text = *texts[file];
            const uint64_t offset = rnd.below(text.size());
            const uint64_t size   = rnd.percent(30) ? text.size() - offset : rnd.between(1, (int64_t) (text.size() - offset));
            to.push_back(std::make_unique<guarded_buffer>(size, rnd.below(9)));
            transfers.push_back(read_of(i, offset, *to[i], file));
        }
        transfer_group group;
        r.submit(group, transfers, urgency::demand);
        if (!group.wait()) {
            check_failed(__FILE__, __LINE__, group.error());
        }
        for (int32_t i = 0; i < 6; ++i) {
            CHECK(to[i]->holds(texts[transfers[i].file]->data() + transfers[i].offset));
        }
    }
}

TEST(real_files_buffered) { read_real_files(io_mode::buffered); }
TEST(real_files_direct)   { read_real_files(io_mode::direct); }

static void truncate_real_file(io_mode mode) {
    const std::string text = random_bytes(64 * KiB, 12);
    real_file file(text);
    if (mode == io_mode::direct) {
        skip_without_direct_reads(file);
    }
    reader r(open_source({ { file.fd, "model-00002-of-00003.gguf" } }, mode), 2, 16 * KiB, false, test_depth);
    CHECK(ftruncate(file.fd, 20000) == 0);
    guarded_buffer to(30 * KiB);
    guarded_buffer before(19 * KiB);
    transfer_group group;
    r.submit(group, { read_of(4, 10 * KiB, to), read_of(5, 100, before) }, urgency::demand);
    CHECK(!group.wait());
    CHECK_EQ(group.failed_tags().size(), 1u);
    CHECK_EQ(group.failed_tags()[0], 4);
    CHECK_CONTAINS(group.error(), "truncated");
    CHECK_CONTAINS(group.error(), "'model-00002-of-00003.gguf'");
    CHECK(before.holds(text.data() + 100));
    CHECK(to.guards_intact());

    // and it grows back
    CHECK_EQ(pwrite(file.fd, text.data() + 20000, text.size() - 20000, 20000), (ssize_t) (text.size() - 20000));
    CHECK(fsync(file.fd) == 0);
    group.clear();
    r.submit(group, { read_of(4, 10 * KiB, to) }, urgency::demand);
    CHECK(group.wait());
    CHECK(to.holds(text.data() + 10 * KiB));
}

TEST(truncated_real_file_buffered) { truncate_real_file(io_mode::buffered); }
TEST(truncated_real_file_direct)   { truncate_real_file(io_mode::direct); }

TEST(direct_reads_stay_out_of_the_page_cache) {
    const std::string text = random_bytes(256 * KiB, 13);
    real_file file(text);
    skip_without_direct_reads(file);
    file.drop_cache();
    auto pages = file.cached_pages();
    if (std::find(pages.begin(), pages.end(), true) != pages.end()) {
        skip_test("this file system does not drop cached pages when asked to");
    }
    reader r(open_source({ { file.fd, "f" } }, io_mode::direct), 2, 64 * KiB, false, test_depth);
    guarded_buffer to(200 * KiB);
    transfer_group group;
    r.submit(group, { read_of(1, 1001, to) }, urgency::demand);
    CHECK(group.wait());
    CHECK(to.holds(text.data() + 1001));
    pages = file.cached_pages();
    CHECK(std::find(pages.begin(), pages.end(), true) == pages.end());
}

// ascending, as read-ahead likes it; the pages in the cache afterwards
static int64_t cached_after_small_reads(real_file & file, const std::string & text, const std::function<int64_t(void *, uint64_t)> & read_page) {
    file.drop_cache();
    auto pages = file.cached_pages();
    if (std::find(pages.begin(), pages.end(), true) != pages.end()) {
        skip_test("this file system does not drop cached pages when asked to");
    }
    char buf[4096];
    for (uint64_t offset = 0; offset < 16 * KiB; offset += sizeof(buf)) {
        CHECK_EQ(read_page(buf, offset), (int64_t) sizeof(buf));
        CHECK(memcmp(buf, text.data() + offset, sizeof(buf)) == 0);
    }
    sleep_ms(100); // read-ahead goes on after the read that began it
    pages = file.cached_pages();
    return std::count(pages.begin(), pages.end(), true);
}

TEST(buffered_reads_do_not_read_ahead) {
    const std::string text = random_bytes(2048 * KiB, 14);
    real_file file(text);
    const int64_t n_read = 16 * KiB / sysconf(_SC_PAGESIZE);
    // without the advice, to know that the check can fail
    if (cached_after_small_reads(file, text, [&](void * buf, uint64_t offset) { return pread(file.fd, buf, 4096, (off_t) offset); }) == n_read) {
        skip_test("this device reads nothing ahead (read_ahead_kb)");
    }
    auto source = open_source({ { file.fd, "f" } }, io_mode::buffered);
    CHECK_EQ(cached_after_small_reads(file, text, [&](void * buf, uint64_t offset) { return source->read_at(0, buf, 4096, offset); }), n_read);
}

TEST(the_loaders_descriptor_is_left_alone) {
    for (io_mode mode : { io_mode::buffered, io_mode::direct }) {
        real_file file(random_bytes(64 * KiB, 15));
        if (mode == io_mode::direct) {
            skip_without_direct_reads(file);
        }
        CHECK_EQ(lseek(file.fd, 1234, SEEK_SET), 1234);
        const int flags = fcntl(file.fd, F_GETFL);
        reader r(open_source({ { file.fd, "f" } }, mode), 1, 16 * KiB, false, test_depth);
        guarded_buffer to(40 * KiB);
        transfer_group group;
        r.submit(group, { read_of(1, 10, to) }, urgency::demand);
        CHECK(group.wait());
        CHECK_EQ(fcntl(file.fd, F_GETFL), flags);
        CHECK_EQ(lseek(file.fd, 0, SEEK_CUR), 1234);
    }
}

TEST(no_descriptor_leaks) {
    real_file file(random_bytes(8 * KiB, 16));
    const int32_t n_before = n_open_descriptors();
    for (io_mode mode : { io_mode::buffered, io_mode::direct }) {
        if (mode == io_mode::direct && !direct_reads_possible(file)) {
            continue;
        }
        {
            auto source = open_source({ { file.fd, "a" }, { file.fd, "b" } }, mode);
            CHECK_EQ(n_open_descriptors(), n_before + 2);
        }
        CHECK_EQ(n_open_descriptors(), n_before);

        // the second one fails: the first is closed again
        std::string error;
        CHECK(make_file_source({ { file.fd, "good.gguf" }, { -1, "bad.gguf" } }, mode, error) == nullptr);
        CHECK_CONTAINS(error, "cannot open 'bad.gguf'");
        CHECK_CONTAINS(error, mode == io_mode::direct ? "direct" : "buffered");
        CHECK_EQ(n_open_descriptors(), n_before);
    }
}

TEST(an_empty_file_is_refused_with_a_reason) {
    real_file file("");
    real_file full(random_bytes(8 * KiB, 17));
    skip_without_direct_reads(full);
    std::string error;
    errno = 0;
    CHECK(make_file_source({ { file.fd, "empty.gguf" } }, io_mode::direct, error) == nullptr);
    CHECK_CONTAINS(error, "'empty.gguf'");
    CHECK_CONTAINS(error, "the file is empty");
}

TEST(a_pipe_is_refused_for_direct_reads) {
    int fds[2];
    CHECK(pipe(fds) == 0);
    // so that a read of the pipe would return
    CHECK(write(fds[1], "x", 1) == 1);
    std::string error;
    CHECK(make_file_source({ { fds[0], "pipe" } }, io_mode::direct, error) == nullptr);
    CHECK_CONTAINS(error, "'pipe'");
    close(fds[0]);
    close(fds[1]);
}

TEST(a_real_error_reaches_the_group) {
    const int dir = open(".", O_RDONLY | O_DIRECTORY);
    CHECK(dir >= 0);
    reader r(open_source({ { dir, "some-directory" } }, io_mode::buffered), 1, 4 * KiB, false, test_depth);
    close(dir);
    guarded_buffer to(10);
    transfer_group group;
    r.submit(group, { read_of(1, 3, to) }, urgency::demand);
    CHECK(!group.wait());
    CHECK_CONTAINS(group.error(), "reading 10 bytes at offset 3 of 'some-directory'");
    CHECK_CONTAINS(group.error(), strerror(EISDIR));
}

int main(int argc, char ** argv) { return run_tests(argc, argv); }
