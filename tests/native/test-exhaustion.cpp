// Memory and threads that run out, one after the other at every place where the engine asks for some: nothing ends the process,
// waits for ever or is told as done, and afterwards everything works again.

#include "check.h"
#include "fake-experts.h"
#include "faulty-source.h"
#include "reader.h"
#include "stream.h"

#include <atomic>
#include <new>
#include <stdexcept>

#include <dlfcn.h>
#include <pthread.h>

using namespace moe;

// from here on every further allocation of any thread fails
static std::atomic<int64_t> n_allocations_left { INT64_MAX };
static std::atomic<int64_t> n_threads_left { INT64_MAX };

void * operator new(size_t size) {
    if (n_allocations_left.load() != INT64_MAX && n_allocations_left.fetch_sub(1) <= 0) {
        throw std::bad_alloc();
    }
    void * p = malloc(size);
    if (!p) {
        throw std::bad_alloc();
    }
    return p;
}

// not inlined: gcc would see free() for new
__attribute__((noinline)) void operator delete(void * p) noexcept { free(p); }
__attribute__((noinline)) void operator delete(void * p, size_t) noexcept { free(p); }

extern "C" int pthread_create(pthread_t * thread, const pthread_attr_t * attr, void * (*fn)(void *), void * arg) noexcept {
    static const auto real = (decltype(&pthread_create)) dlsym(RTLD_NEXT, "pthread_create");
    return n_threads_left.load() != INT64_MAX && n_threads_left.fetch_sub(1) <= 0 ? EAGAIN : real(thread, attr, fn, arg);
}

// a request for more than there is returns null, as without sanitizers
extern "C" const char * __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" const char * __tsan_default_options() { return "allocator_may_return_null=1"; }

namespace {

struct memory_for {
    explicit memory_for(int64_t n_allocations) { n_allocations_left = n_allocations; }
    ~memory_for() { n_allocations_left = INT64_MAX; }
    bool ran_out() const { return n_allocations_left < 0; }
};

const std::string text = random_bytes(64 * 1024, 1);

std::unique_ptr<file_source> source_of_text(uint32_t align, faulty_source::hook_fn hook = nullptr) {
    return std::make_unique<faulty_source>(std::vector<std::string> { text }, align, std::move(hook));
}

// a reader with one worker that is busy until go()
struct busy_reader {
    std::atomic<bool> begun { false };
    std::atomic<bool> gone { false };
    int64_t           result = INT64_MAX; // of the reads behind the first
    char              byte = 0;
    transfer_group    plug;
    reader            r;

    busy_reader() : r(source_of_text(1, [this](int32_t, uint64_t size, uint64_t) -> int64_t {
        if (!begun.exchange(true)) {
            while (!gone) {
                std::this_thread::yield();
            }
            return (int64_t) size;
        }
        return result;
    }), 1, 1024) {
        r.submit(plug, { { 0, 0, 0, 1, &byte, nullptr } }, urgency::demand);
        while (!begun) {
            std::this_thread::yield();
        }
    }

    ~busy_reader() { go(); }

    void go() { gone = true; }
};

std::string message_of(const std::function<void()> & fn) {
    try {
        fn();
    } catch (const std::runtime_error & e) {
        return e.what();
    }
    return "";
}

} // namespace

TEST(threads_that_do_not_start_are_an_error_with_a_hint) {
    for (const uint32_t align : { 1u, 4096u }) {
        for (int32_t n = 0; n < 4; ++n) {
            auto source = source_of_text(align);
            n_threads_left = n;
            const std::string error = message_of([&] { reader r(std::move(source), 4, 4096); });
            n_threads_left = INT64_MAX;
            CHECK_CONTAINS(error, "cannot start 4 threads to read experts, only " + std::to_string(n) + ": ");
            CHECK_CONTAINS(error, strerror(EAGAIN));
            CHECK_CONTAINS(error, "hint: a smaller --moe-io-threads");
        }
    }
}

TEST(buffers_without_memory_are_an_error_with_a_hint) {
    const std::string error = message_of([] { reader r(source_of_text(4096), 16, 1ull << 45); });
    CHECK_CONTAINS(error, "no memory for the buffers of 16 threads");
    CHECK_CONTAINS(error, "hint: a smaller --moe-io-threads");
}

TEST(a_reader_is_there_or_not) {
    int32_t n_refused = 0;
    for (int64_t n = 0; ; ++n) {
        auto source = source_of_text(4096);
        std::unique_ptr<reader> r;
        bool ran_out;
        {
            memory_for some(n);
            try {
                r = std::make_unique<reader>(std::move(source), 3, 4096);
            } catch (const std::exception &) {
                n_refused++;
            }
            ran_out = some.ran_out();
        }
        CHECK_EQ(r == nullptr, ran_out);
        if (r) {
            guarded_buffer to(9000);
            transfer_group group;
            r->submit(group, { { 1, 0, 100, to.size, to.data(), nullptr } }, urgency::demand);
            CHECK(group.wait());
            CHECK(to.holds(text.data() + 100));
            break;
        }
    }
    CHECK(n_refused > 3);
}

TEST(a_submission_is_taken_whole_or_fails_whole) {
    int32_t n_refused = 0;
    for (const urgency how : { urgency::demand, urgency::background }) {
        for (int64_t n = 0; n < 12; ++n) {
            busy_reader b;
            guarded_buffer before(700), one(20000), other(20001);
            transfer_group first, group;
            b.r.submit(first, { { 9, 0, 5, before.size, before.data(), nullptr } }, how);
            const std::vector<transfer> transfers = {
                { 3, 0, 1, one.size, one.data(), nullptr }, { 4, 0, 30000, other.size, other.data(), nullptr },
            };
            bool ran_out;
            {
                memory_for some(n);
                b.r.submit(group, transfers, how);
                ran_out = some.ran_out();
            }
            CHECK_EQ(group.idle(), ran_out);
            b.go();
            CHECK_EQ(group.wait(), !ran_out);
            CHECK_EQ(group.ok(), !ran_out);
            CHECK(first.wait());
            CHECK(before.holds(text.data() + 5));
            if (ran_out) {
                n_refused++;
                CHECK(group.has_failed(3) && group.has_failed(4));
                CHECK_CONTAINS(group.error(), "no memory");
                group.clear();
                CHECK(group.ok() && !group.has_failed(3));
                b.r.submit(group, transfers, how);
                CHECK(group.wait());
            }
            CHECK(one.holds(text.data() + 1));
            CHECK(other.holds(text.data() + 30000));
        }
    }
    CHECK(n_refused >= 2);
}

TEST(an_error_that_finds_no_words_is_still_one) {
    for (int64_t n = 0; n < 20; ++n) {
        busy_reader b;
        guarded_buffer to(500);
        transfer_group group;
        b.result = -EIO;
        b.r.submit(group, { { 3, 0, 0, to.size, to.data(), nullptr } }, urgency::demand);
        {
            memory_for some(n);
            b.go();
            CHECK(!group.wait());
        }
        CHECK(group.has_failed(3));
        CHECK(!group.error().empty());
    }
}

TEST(a_reader_that_goes_without_memory_says_so) {
    int32_t n_stopped = 0;
    for (int64_t n = 0; n < 10; ++n) {
        guarded_buffer to(500);
        transfer_group group;
        auto b = std::make_unique<busy_reader>();
        b->r.submit(group, { { 3, 0, 0, to.size, to.data(), nullptr } }, urgency::demand);
        std::thread opener([&b] {
            std::this_thread::sleep_for(std::chrono::milliseconds(20)); // by then the reader is told to stop, unless the machine is busy
            b->go();
        });
        {
            memory_for some(n);
            b->r.~reader();
        }
        opener.join();
        if (!group.wait()) {
            n_stopped++;
            CHECK(group.has_failed(3));
            CHECK(!group.error().empty());
        }
        new (&b->r) reader(source_of_text(1), 1);
    }
    CHECK(n_stopped > 0);
}

TEST(what_cannot_be_promoted_comes_in_its_turn) {
    for (int64_t n = 0; n < 4; ++n) {
        busy_reader b;
        std::vector<char> bytes(200);
        std::vector<transfer> transfers;
        for (int32_t i = 0; i < 200; ++i) {
            transfers.push_back({ i, 0, (uint64_t) i * 3, 1, &bytes[i], nullptr });
        }
        transfer_group group;
        b.r.submit(group, transfers, urgency::background);
        {
            memory_for some(n);
            b.r.promote(group);
        }
        b.go();
        CHECK(group.wait());
        for (int32_t i = 0; i < 200; ++i) {
            CHECK_EQ(bytes[i], text[i * 3]);
        }
    }
}

// any allocation between compute_begin() and compute_end() may fail: the graph is right, or an error
TEST(a_graph_without_memory_is_an_error_and_the_next_one_right) {
    fake_experts experts({ { 9, 4, { 300, 70 } }, { 9, 4, { 300 } }, { 9, 9, { 128, 128 } } }, 3);
    auto owned = std::make_unique<place_source>(experts.contents, 1, 4);
    place_source * source = owned.get();
    stream::options opt;
    opt.poison     = true;
    opt.staging    = experts.staging.get();
    opt.half_bytes = experts.half_bytes;
    stream s(opt, experts.layers, std::make_unique<reader>(std::move(owned), 2, 64, true));

    test_random rnd(6);
    const std::vector<std::vector<int32_t>> narrow = { { 1, 5 }, { 8, 1 } };
    const std::vector<std::vector<int32_t>> wide   = { { 0, 1 }, { 2, 3 }, { 4, 5 }, { 6, 7 }, { 8, 0 } };
    const std::vector<std::vector<int32_t>> broken = { { 1, 5 }, { 8, 8 } };
    const id_layout ids_narrow(narrow, rnd), ids_wide(wide, rnd), ids_broken(broken, rnd);
    std::vector<int32_t> out(10);

    const auto visit = [&](int32_t i, bool staged, const id_layout & ids, const std::vector<std::vector<int32_t>> & by_token, bool read_next) {
        if (staged) {
            s.begin_staging(i, ids.chosen, out.data(), read_next);
        } else {
            s.begin_slots(i, ids.chosen, out.data());
        }
        s.wait(i, staged, true);
        s.settle(i, staged);
        for (size_t t = 0; t < by_token.size(); ++t) {
            for (size_t k = 0; k < 2; ++k) {
                const int32_t id = out[t * 2 + k];
                if (&by_token != &broken && !experts.holds(i, staged, id, by_token[t][k])) {
                    return false;
                }
            }
        }
        return true;
    };
    int32_t n_failed = 0;
    int32_t n_right  = 0;
    for (int32_t round = 0; round < 200; ++round) {
        const int32_t kind = round % 4; // slots, staging, a failed read, a router's nonsense
        bool right = true;
        bool ran_out;
        std::string error;
        if (kind == 2) {
            const expert_part & p = experts.layers[0].parts[0];
            source->set_bad({ { p.file, p.offset + 8 * p.expert_bytes, -EIO } });
        }
        {
            memory_for some(round / 4);
            s.compute_begin();
            for (int32_t i = 0; i < 3; ++i) {
                const bool staged = kind == 1 && i < 2;
                right = visit(i, staged, staged ? ids_wide : kind == 3 ? ids_broken : ids_narrow, staged ? wide : kind == 3 ? broken : narrow, staged && i == 0) && right;
            }
            error = s.compute_end(true);
            ran_out = some.ran_out();
        }
        source->set_bad({});
        CHECK(ran_out || !error.empty() || right);
        CHECK(right || !error.empty());
        CHECK(kind != 3 || !error.empty());
        n_failed += !error.empty();
        n_right  += error.empty();

        s.compute_begin();
        for (int32_t i = 0; i < 3; ++i) {
            // other experts, so that the next round has misses
            const std::vector<std::vector<int32_t>> others = { { 2, 3 }, { round % 9 == 3 ? 4 : 3, 2 } };
            const id_layout ids(others, rnd);
            CHECK(visit(i, false, ids, others, false));
        }
        CHECK_EQ(s.compute_end(true), "");
    }
    CHECK(n_failed > 10 && n_right > 10);
}

int main(int argc, char ** argv) { return run_tests(argc, argv); }
