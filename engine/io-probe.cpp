#include "io-probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <random>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace moe {

namespace {

using probe_clock = std::chrono::steady_clock;

double seconds_since(probe_clock::time_point t) {
    return std::chrono::duration<double>(probe_clock::now() - t).count();
}

struct sample {
    int32_t  file;
    uint64_t offset;
    uint64_t size;
};

class prober {
public:
    prober(const std::vector<open_file> & files, const std::vector<probe_place> & places, const probe_plan & plan)
        : files(files), plan(plan), page((uint64_t) sysconf(_SC_PAGESIZE)) {
        std::mt19937_64 rnd(plan.seed);
        for (const probe_place & p : places) {
            for (int32_t e = 0; e < p.n_expert; ++e) {
                const uint64_t size = std::min(p.expert_bytes, plan.request_bytes);
                const uint64_t skip = p.expert_bytes / size > 1 ? rnd() % (p.expert_bytes / size) * size : 0;
                samples.push_back({ p.file, p.offset + e * p.expert_bytes + skip, size });
            }
        }
        std::shuffle(samples.begin(), samples.end(), rnd);
    }

    ~prober() {
#ifdef POSIX_FADV_DONTNEED
        for (const sample & s : cached_by_us) {
            posix_fadvise(files[s.file].fd, (off_t) s.offset, (off_t) s.size, POSIX_FADV_DONTNEED);
        }
#endif
    }

    void run(probe_result & out) {
        if (samples.empty()) {
            out.note = "there are no experts to read";
            return;
        }
        const size_t n_ways = plan.in_flight.size() * (1 + plan.buffered) + (plan.threads && plan.uring ? 1 + plan.buffered : 0);
        const double window_s = plan.limit_s / (double) n_ways;
        const io_backend first = plan.threads ? io_backend::threads : io_backend::uring;
        for (const io_mode mode : { io_mode::direct, io_mode::buffered }) {
            if (mode == io_mode::buffered && !plan.buffered && out.direct_refusal.empty()) {
                return;
            }
            int32_t  best_n    = 0;
            uint64_t best_rate = 0;
            for (const int32_t n : plan.in_flight) {
                if (!measure(mode, first, n, window_s, out)) {
                    break;
                }
                if (out.rates.back().bytes_per_s > best_rate) {
                    best_rate = out.rates.back().bytes_per_s;
                    best_n    = n;
                }
            }
            if (!out.note.empty()) {
                return;
            }
            if (plan.threads && plan.uring && best_n > 0 && !measure(mode, io_backend::uring, best_n, window_s, out)) {
                return;
            }
        }
    }

private:
    bool measure(io_mode mode, io_backend backend, int32_t n, double window_s, probe_result & out) {
        const double expected_s = out.rates.empty() ? 0 : (double) (n * plan.request_bytes) / (double) (out.rates.back().bytes_per_s + 1);
        if (seconds_since(begin) + std::max(window_s, expected_s) > plan.limit_s * 1.1) {
            out.note = "the drive is too slow to measure more";
            return false;
        }
        std::string error;
        auto source = make_file_source(files, mode, error, backend);
        if (!source) {
            if (mode == io_mode::direct) {
                out.direct_refusal = error;
            } else {
                out.note = error;
            }
            return false;
        }
        const int32_t n_worker = backend == io_backend::uring ? 1 : n;
        const int32_t depth    = n / n_worker;
        std::vector<std::unique_ptr<read_queue>> queues;
        std::vector<aligned_buffer> buffers;
        for (int32_t i = 0; i < n; ++i) {
            void * p = nullptr;
            if (posix_memalign(&p, 4096, plan.request_bytes + 2ull * source->alignment()) != 0) {
                throw std::bad_alloc();
            }
            buffers.emplace_back((uint8_t *) p);
        }
        for (int32_t i = 0; i < n_worker; ++i) {
            queues.push_back(source->make_queue(depth));
        }
        n_bytes = 0;
        stop    = false;
        const auto t0 = probe_clock::now();
        const auto end = t0 + std::chrono::duration_cast<probe_clock::duration>(std::chrono::duration<double>(window_s));
        {
            std::vector<std::thread> threads;
            threads.reserve(n_worker - 1);
            struct join_all {
                std::vector<std::thread> & threads;
                ~join_all() {
                    for (std::thread & t : threads) {
                        t.join();
                    }
                }
            } join { threads };
            for (int32_t i = 1; i < n_worker; ++i) {
                threads.emplace_back([&, i] { work(*queues[i], &buffers[i * depth], depth, *source, mode, end); });
            }
            work(*queues[0], &buffers[0], depth, *source, mode, end);
        }
        const double s = seconds_since(t0);
        if (n_bytes == 0 || (stop && mode == io_mode::direct)) {
            out.note = stop && mode == io_mode::buffered ? "too few experts are outside the page cache" : "a read failed";
            return false;
        }
        out.rates.push_back({ mode, backend, n, (uint64_t) ((double) n_bytes / s) });
        return true;
    }

    // keeps depth reads under way until the end
    void work(read_queue & queue, aligned_buffer * buffers, int32_t depth, const file_source & source, io_mode mode, probe_clock::time_point end) noexcept {
        const uint64_t align = source.alignment();
        int32_t n_under_way = 0;
        const auto start = [&](int32_t id) {
            sample s;
            if (stop || probe_clock::now() >= end || !next_sample(mode, s)) {
                return;
            }
            const uint64_t from = s.offset / align * align;
            const uint64_t to   = (s.offset + s.size + align - 1) / align * align;
            queue.start(id, s.file, buffers[id].get(), to - from, from);
            n_under_way++;
        };
        for (int32_t id = 0; id < depth; ++id) {
            start(id);
        }
        while (n_under_way > 0) {
            int64_t n;
            const int32_t id = queue.next(n);
            if (id < 0) {
                continue;
            }
            n_under_way--;
            if (n > 0) {
                n_bytes += (uint64_t) n;
            } else if (n != -EINTR) {
                stop = true;
            }
            start(id);
        }
    }

    // false: there is none left that would say something
    bool next_sample(io_mode mode, sample & out) noexcept {
        std::lock_guard<std::mutex> lock(mutex);
        if (mode == io_mode::direct) { // which never looks into the page cache: experts may come again
            out = samples[n_taken++ % samples.size()];
            return true;
        }
        // from the other end, where direct reads have warmed no cache of the drive either
        while (!samples.empty()) {
            out = samples.back();
            samples.pop_back();
            if (is_uncached(out)) {
                try {
                    cached_by_us.push_back(pages_of(out));
                } catch (const std::bad_alloc &) {
                    break;
                }
                return true;
            }
        }
        stop = true;
        return false;
    }

    sample pages_of(const sample & s) const {
        const uint64_t from = s.offset / page * page;
        return { s.file, from, (s.offset + s.size + page - 1) / page * page - from };
    }

    // Mapped for as long as the question takes, and never touched. Where the kernel does not tell, it says that everything is cached.
    bool is_uncached(const sample & s) const {
        const sample pages = pages_of(s);
        void * map = mmap(nullptr, pages.size, PROT_READ, MAP_SHARED, files[s.file].fd, (off_t) pages.offset);
        if (map == MAP_FAILED) {
            return false;
        }
        std::vector<unsigned char> & state = page_states;
        bool uncached = false;
        try {
            state.assign(pages.size / page, 1);
#ifdef __linux__
            uncached = mincore(map, pages.size, state.data()) == 0 &&
                std::none_of(state.begin(), state.end(), [](unsigned char c) { return c & 1; });
#endif
        } catch (const std::bad_alloc &) {
        }
        munmap(map, pages.size);
        return uncached;
    }

    const std::vector<open_file> & files;
    const probe_plan &             plan;
    const uint64_t                 page;
    const probe_clock::time_point  begin = probe_clock::now();

    std::mutex          mutex;
    std::vector<sample> samples;      // guarded by mutex; shuffled
    std::vector<sample> cached_by_us; // guarded by mutex; whole pages
    size_t              n_taken = 0;  // guarded by mutex
    mutable std::vector<unsigned char> page_states; // guarded by mutex

    std::atomic<uint64_t> n_bytes { 0 };
    std::atomic<bool>     stop { false };
};

// the fastest of a mode and backend; null when it was not measured
const probe_rate * fastest(const probe_result & probe, io_mode mode, io_backend backend, int32_t n_in_flight = 0) {
    const probe_rate * best = nullptr;
    for (const probe_rate & r : probe.rates) {
        if (r.mode == mode && (backend == io_backend::automatic || r.backend == backend) && (n_in_flight == 0 || r.n_in_flight == n_in_flight) &&
            (!best || r.bytes_per_s > best->bytes_per_s)) {
            best = &r;
        }
    }
    return best;
}

bool is_better(const probe_rate & a, const probe_rate & b, int32_t percent) {
    return a.bytes_per_s > b.bytes_per_s / 100 * (100 + (uint64_t) percent);
}

std::string in_words(const probe_rate & r) {
    char text[96];
    snprintf(text, sizeof(text), "%s %.2f GB/s", io_mode_name(r.mode), (double) r.bytes_per_s / 1e9);
    return text;
}

} // namespace

probe_result probe_io(const std::vector<open_file> & files, const std::vector<probe_place> & places, const probe_plan & plan) noexcept {
    probe_result out;
    try {
        prober(files, places, plan).run(out);
    } catch (const std::exception & e) {
        try {
            out.note = e.what();
        } catch (const std::bad_alloc &) {
            out.note = "no memory";
        }
    }
    return out;
}

io_choice choose_io(const io_wish & wish, bool fits, const probe_result & probe) {
    io_choice out = { wish.mode, wish.backend, wish.n_in_flight, "", false };
    const io_backend measured = wish.backend;
    const probe_rate * direct   = fastest(probe, io_mode::direct, measured);
    const probe_rate * buffered = fastest(probe, io_mode::buffered, measured);
    if (wish.mode == io_mode::automatic) {
        const bool is_faster = !fits && direct && buffered && is_better(*buffered, *direct, much_better_percent);
        out.mode = fits || is_faster || !probe.direct_refusal.empty() ? io_mode::buffered : io_mode::direct;
        out.buffered_is_faster = is_faster;
    }

    // what was measured of the mode; direct reads stand for reads of what is not cached yet
    const io_mode like = fastest(probe, out.mode, measured) ? out.mode : io_mode::direct;
    if (out.n_in_flight == 0) {
        out.n_in_flight = default_in_flight;
        const probe_rate * usual = fastest(probe, like, measured, default_in_flight);
        const probe_rate * best  = usual;
        for (const probe_rate & r : probe.rates) {
            const int32_t percent = r.n_in_flight < default_in_flight ? much_better_percent : better_percent;
            if (usual && r.mode == like && r.n_in_flight >= min_in_flight && is_better(r, *usual, percent) && is_better(r, *best, 0)) {
                best = &r;
            }
        }
        if (best) {
            out.n_in_flight = best->n_in_flight;
        }
    }
    if (out.backend == io_backend::automatic) {
        out.backend = io_backend::threads;
        const probe_rate * threads = fastest(probe, like, io_backend::threads);
        const probe_rate * uring   = fastest(probe, like, io_backend::uring);
        if (threads && uring && is_better(*uring, *threads, better_percent)) {
            out.backend     = io_backend::uring;
            out.n_in_flight = wish.n_in_flight ? wish.n_in_flight : std::max(uring->n_in_flight, default_in_flight);
        }
    }
    for (const probe_rate * r : { direct, buffered }) {
        if (r) {
            out.measured += (out.measured.empty() ? "" : ", ") + in_words(*r);
        }
    }
    return out;
}

int32_t n_workers(io_backend backend, int32_t n_in_flight, int32_t n_cores) {
    if (backend != io_backend::uring) {
        return n_in_flight;
    }
    int32_t n = std::max(1, std::min({ n_in_flight, n_cores, default_in_flight }));
    while (n_in_flight % n != 0) {
        n--;
    }
    return n;
}

} // namespace moe
