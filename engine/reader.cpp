#include "reader.h"

#include "uring.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace moe {

// covers 512-byte and 4 KiB logical blocks
static constexpr uint32_t direct_alignment = 4096;

// A direct read begins up to a block before the byte wanted, so a short one may end before it. That looks like the end of the
// file and is worth another try, but not for ever.
static constexpr int32_t n_fruitless_max = 16;

const char * io_mode_name(io_mode mode) {
    switch (mode) {
        case io_mode::automatic: return "auto";
        case io_mode::direct:    return "direct";
        case io_mode::buffered:  return "buffered";
    }
    std::abort();
}

bool io_mode_from_name(const std::string & name, io_mode & out) {
    for (io_mode mode : { io_mode::automatic, io_mode::direct, io_mode::buffered }) {
        if (name == io_mode_name(mode)) {
            out = mode;
            return true;
        }
    }
    return false;
}

const char * io_backend_name(io_backend backend) {
    switch (backend) {
        case io_backend::automatic: return "auto";
        case io_backend::threads:   return "threads";
        case io_backend::uring:     return "uring";
    }
    std::abort();
}

bool io_backend_from_name(const std::string & name, io_backend & out) {
    for (io_backend backend : { io_backend::automatic, io_backend::threads, io_backend::uring }) {
        if (name == io_backend_name(backend)) {
            out = backend;
            return true;
        }
    }
    return false;
}

namespace {

// read_at() when the result is asked for
class blocking_queue final : public read_queue {
public:
    blocking_queue(file_source & source, int32_t depth) : source(source) { waiting.reserve(depth); }

    void start(int32_t id, int32_t file, void * buf, uint64_t size, uint64_t offset) noexcept override {
        waiting.push_back({ id, file, buf, size, offset });
    }

    int32_t next(int64_t & result) noexcept override {
        const request r = waiting.front();
        waiting.erase(waiting.begin());
        try {
            result = source.read_at(r.file, r.buf, r.size, r.offset);
        } catch (const std::bad_alloc &) { // of a test's source
            result = -ENOMEM;
        }
        return r.id;
    }

private:
    struct request {
        int32_t  id;
        int32_t  file;
        void   * buf;
        uint64_t size;
        uint64_t offset;
    };

    file_source &        source;
    std::vector<request> waiting; // at most depth
};

uint8_t * allocate_aligned(uint64_t size, uint32_t align) {
    void * p = nullptr;
    return posix_memalign(&p, align, size) == 0 ? (uint8_t *) p : nullptr;
}

class posix_files final : public file_source {
public:
    ~posix_files() override {
        for (const open_file & f : files) {
            close(f.fd);
        }
    }

    const std::string & name(int32_t file) const override { return files[file].name; }
    uint32_t alignment() const override { return direct ? direct_alignment : 1; }

    int64_t read_at(int32_t file, void * buf, uint64_t size, uint64_t offset) override {
        const ssize_t n = pread(files[file].fd, buf, size, (off_t) offset);
        return n < 0 ? -errno : n;
    }

    std::unique_ptr<read_queue> make_queue(int32_t depth) override {
        if (backend != io_backend::uring) {
            return file_source::make_queue(depth);
        }
        std::vector<int> fds;
        for (const open_file & f : files) {
            fds.push_back(f.fd);
        }
        std::string error;
        auto queue = make_uring(fds, depth, error);
        if (!queue) {
            throw std::runtime_error(error);
        }
        return queue;
    }

    void drop_cache() override {
#ifdef POSIX_FADV_DONTNEED
        for (const open_file & f : files) {
            posix_fadvise(f.fd, 0, 0, POSIX_FADV_DONTNEED); // to the end; pages that are mapped stay
        }
#endif
    }

    bool open_all(const std::vector<open_file> & given, bool want_direct, io_backend how, std::string & error) {
        direct  = want_direct;
        backend = how;
        for (const open_file & f : given) {
            const int fd = reopen(f.fd);
            if (fd < 0) {
                error = "cannot open '" + f.name + "' for " + (direct ? "direct" : "buffered") + " reads: " + strerror(errno);
                return false;
            }
            files.push_back({ fd, f.name });
            if (direct && !direct_read_works(fd, error)) {
                error = "a direct read of " + std::to_string(direct_alignment) + " bytes at offset 0 of '" + f.name + "' failed: " + error;
                return false;
            }
#ifdef POSIX_FADV_RANDOM
            if (!direct) {
                posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
            }
#endif
        }
        return true;
    }

private:
    // a file description of our own: flags and read-ahead of the loader's stay as they are
    int reopen(int fd) const {
#ifdef __linux__
        const std::string path = "/proc/self/fd/" + std::to_string(fd);
        const int own = open(path.c_str(), O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
        if (own >= 0 || direct) {
            return own;
        }
#endif
        if (direct) {
            errno = EOPNOTSUPP;
            return -1;
        }
        return fcntl(fd, F_DUPFD_CLOEXEC, 0);
    }

    // some file systems accept the flag and refuse the read
    static bool direct_read_works(int fd, std::string & why) {
        const aligned_buffer buf(allocate_aligned(direct_alignment, direct_alignment));
        if (!buf) {
            why = "no memory for the aligned buffer";
            return false;
        }
        ssize_t n;
        do {
            n = pread(fd, buf.get(), direct_alignment, 0);
        } while (n < 0 && errno == EINTR);
        if (n <= 0) {
            why = n < 0 ? strerror(errno) : "the file is empty";
        }
        return n > 0;
    }

    std::vector<open_file> files; // owned descriptors
    bool                   direct  = false;
    io_backend             backend = io_backend::threads;
};

} // namespace

std::unique_ptr<read_queue> file_source::make_queue(int32_t depth) {
    return std::make_unique<blocking_queue>(*this, depth);
}

std::unique_ptr<file_source> make_file_source(const std::vector<open_file> & files, io_mode mode, std::string & error, io_backend backend) {
    auto source = std::make_unique<posix_files>();
    if (!source->open_all(files, mode == io_mode::direct, backend, error)) {
        return nullptr;
    }
    return source;
}

bool transfer_group::wait() {
    std::unique_lock<std::mutex> lock(mutex);
    done.wait(lock, [this] { return idle(); });
    return ok();
}

void transfer_group::wait(const landing & bytes) {
    std::unique_lock<std::mutex> lock(mutex);
    done.wait(lock, [&] { return bytes.is_here(); });
}

bool transfer_group::has_failed(int32_t tag) const {
    return all_failed || std::find(failed.begin(), failed.end(), tag) != failed.end();
}

void transfer_group::clear() {
    std::lock_guard<std::mutex> lock(mutex);
    failed.clear();
    all_failed = false;
    first_error.clear();
}

// where memory may be what is missing; short enough for a string to hold it without any
static const char * const no_memory = "no memory";

// what make() says, or that there was no memory to say it
template <typename F> static std::string in_words(F && make) {
    try {
        return make();
    } catch (const std::bad_alloc &) {
        return no_memory;
    }
}

// what was attempted, for messages; the part of the transfer that one worker took
static std::string describe(const transfer & t, const file_source & source) {
    const std::string size = std::to_string(t.size);
    if (t.src) {
        return "copying " + size + " bytes from memory";
    }
    return "reading " + size + " bytes at offset " + std::to_string(t.offset) + " of '" + source.name(t.file) + "'";
}

static std::string failure(const transfer & t, const file_source & source, uint64_t pos, const std::string & why) {
    return describe(t, source) + " failed at offset " + std::to_string(pos) + ": " + why;
}

// offsets are signed for the system, and rounding up to a block must not overflow
static bool is_in_reach(const transfer & t) {
    return t.offset <= INT64_MAX && t.size <= INT64_MAX - t.offset;
}

void copy_in(const storage * at, void * dst, const void * src, uint64_t size) {
    if (at) {
        at->copy(dst, src, size);
    } else {
        memcpy(dst, src, size);
    }
}

void fill_in(const storage * at, void * dst, uint8_t value, uint64_t size) {
    if (at) {
        at->fill(dst, value, size);
    } else {
        memset(dst, value, size);
    }
}

// what is read does not go to dst as it comes, but from a bounce buffer when it is complete
static bool is_passed_on(const transfer & t) {
    return t.convert || t.at;
}

// a buffer of a read in memory that was given, in blocks of the strictest direct reads
static uint64_t given_stride(uint64_t bounce_size) {
    return (bounce_size + 4095) / 4096 * 4096;
}

uint64_t reader::bounce_bytes_for(const file_source & source, int32_t n_in_flight, uint64_t chunk_size) {
    return n_in_flight * given_stride(chunk_size + 2ull * source.alignment());
}

reader::reader(std::unique_ptr<file_source> source_in, int32_t n_threads, uint64_t chunk_size, bool converts, int32_t depth, uint8_t * bounce)
    : source(std::move(source_in)), chunk_size(chunk_size) {
    const uint32_t align = source->alignment();
    if (n_threads <= 0 || depth <= 0 || chunk_size == 0 || align == 0 || chunk_size % align != 0) {
        fprintf(stderr, "reader: %d threads, depth %d, chunk size %llu, alignment %u: impossible\n", n_threads, depth,
            (unsigned long long) chunk_size, align);
        abort();
    }
    const std::string wanted = std::to_string(n_threads) + " threads to read experts";
    const std::string hint   = "; hint: a smaller --moe-io-threads";
    if (bounce) {
        bounce_bytes_given = bounce_bytes_for(*source, n_threads * depth, chunk_size);
    } else if (align > 1 || converts) {
        bounces.resize(n_threads * depth);
        for (auto & b : bounces) {
            b.reset(allocate_aligned(bounce_size(), std::max<uint32_t>(align, 64)));
            if (!b) {
                throw std::runtime_error("no memory for the buffers of " + wanted + ", " + std::to_string(bounce_size()) + " bytes each" + hint);
            }
        }
    }
    workers.resize(n_threads);
    for (int32_t i = 0; i < n_threads; ++i) {
        worker & w = workers[i];
        try {
            w.queue = source->make_queue(depth);
        } catch (const std::runtime_error & e) {
            throw std::runtime_error("cannot set up " + wanted + ": " + e.what() + hint + ", or --moe-io-backend threads");
        }
        w.flights.resize(depth);
        w.idle.reserve(depth);
        w.taken.reserve(depth + max_writes);
        for (int32_t id = depth - 1; id >= 0; --id) {
            w.flights[id].bounce = bounce ? bounce + (i * depth + id) * given_stride(bounce_size()) :
                bounces.empty() ? nullptr : bounces[i * depth + id].get();
            w.idle.push_back(id);
        }
    }
    try {
        threads.reserve(n_threads);
        for (worker & w : workers) {
            threads.emplace_back([this, &w] { work(w); });
        }
    } catch (const std::exception & e) {
        const size_t n_started = threads.size();
        stop();
        throw std::runtime_error("cannot start " + wanted + ", only " + std::to_string(n_started) + ": " + e.what() + hint);
    }
}

reader::~reader() {
    stop();
    for (const auto * queue : { &queue_demand, &queue_background }) {
        for (const job & j : *queue) {
            finish(j, in_words([&] { return describe(j.part, *source) + " failed: the reader was stopped"; }));
        }
    }
}

void reader::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    wake.notify_all();
    for (std::thread & t : threads) {
        t.join();
    }
    threads.clear();
}

uint64_t reader::bounce_size() const {
    return chunk_size + 2ull * source->alignment();
}

// What is read at once of a transfer, from pos on: pieces of about the same size, that meet between two blocks of a direct read, or between
// two units of a conversion.
uint64_t reader::next_piece(const transfer & t, uint64_t pos) const {
    const uint64_t rest = t.size - pos;
    if (rest <= chunk_size) {
        return rest;
    }
    if (t.convert) {
        return chunk_size / t.convert->unit() * t.convert->unit();
    }
    const uint64_t align = source->alignment();
    const uint64_t begin = t.offset + pos;
    const uint64_t share = rest / ((rest + chunk_size - 1) / chunk_size);
    const uint64_t end   = std::max((begin + share) / align, begin / align + 1) * align;
    return std::min(end - begin, rest);
}

void reader::submit(transfer_group & group, const std::vector<transfer> & transfers, urgency how) noexcept {
    size_t n_jobs = 0;
    {
        std::lock_guard<std::mutex> lock(mutex);
        std::deque<job> & queue = how == urgency::demand ? queue_demand : queue_background;
        const size_t n_before = queue.size();
        try {
            for (const transfer & t : transfers) {
                if (t.size == 0) {
                    continue;
                }
                if (t.src || !is_in_reach(t)) {
                    queue.push_back({ &group, t });
                    continue;
                }
                for (uint64_t pos = 0; pos < t.size; ) {
                    const uint64_t size = next_piece(t, pos);
                    queue.push_back({ &group, { t.tag, t.file, t.offset + pos, size, (uint8_t *) t.dst + pos, nullptr, t.convert, t.lands,
                        t.save ? (uint8_t *) t.save + pos : nullptr, t.at } });
                    pos += size;
                }
            }
            n_jobs = queue.size() - n_before;
            // before a worker can take one: all of them wait for the lock
            group.n_pending.fetch_add((int64_t) n_jobs, std::memory_order_relaxed);
            for (size_t i = n_before; i < queue.size(); ++i) {
                if (landing * l = queue[i].part.lands) {
                    l->n_left.fetch_add(1, std::memory_order_relaxed);
                }
            }
            for (worker & w : workers) {
                if (n_jobs > 0 && w.has_room) {
                    w.has_room = false;
                    w.queue->wake();
                }
            }
        } catch (const std::bad_alloc &) {
            queue.resize(n_before); // all or nothing, so that the group says what is true
            std::lock_guard<std::mutex> lock_group(group.mutex);
            group.all_failed = true;
            if (group.first_error.empty()) {
                group.first_error = no_memory;
            }
        }
    }
    if (n_jobs == 1) {
        wake.notify_one();
    } else if (n_jobs > 1) {
        wake.notify_all();
    }
}

void reader::promote(transfer_group & group) noexcept {
    std::lock_guard<std::mutex> lock(mutex);
    const auto is_of_group = [&](const job & j) { return j.group == &group; };
    const auto n = std::count_if(queue_background.begin(), queue_background.end(), is_of_group);
    if (n == 0) {
        return;
    }
    try {
        queue_demand.insert(queue_demand.begin(), n, job {});
    } catch (const std::bad_alloc &) {
        return; // they come in their turn
    }
    std::copy_if(queue_background.begin(), queue_background.end(), queue_demand.begin(), is_of_group);
    queue_background.erase(std::remove_if(queue_background.begin(), queue_background.end(), is_of_group), queue_background.end());
}

uint64_t reader::cancel(transfer_group & group) noexcept {
    uint64_t n_bytes = 0;
    std::lock_guard<std::mutex> lock(mutex);
    const auto end = std::remove_if(queue_background.begin(), queue_background.end(), [&](const job & j) {
        if (j.group == &group) {
            n_bytes += j.part.size;
            finish(j, "");
        }
        return j.group == &group;
    });
    queue_background.erase(end, queue_background.end());
    return n_bytes;
}

// from the processor's memory to a storage: begun, and waited for with others
static bool is_write(const transfer & t) {
    return t.src && t.at && t.src_is_ours;
}

// Moves work to the worker: no more than it can start, and no more than its share of what waits, so that all of them copy and convert.
// False: it is time to go.
bool reader::take(worker & w) {
    std::unique_lock<std::mutex> lock(mutex);
    const auto n_waiting = [this] { return queue_demand.size() + queue_background.size(); };
    w.has_room = false;
    if (w.idle.size() == w.flights.size()) {
        wake.wait(lock, [&] { return stopping || n_waiting() > 0; });
    }
    if (stopping) {
        return w.idle.size() < w.flights.size(); // what was begun is brought to its end
    }
    const size_t share = (n_waiting() + workers.size() - 1) / workers.size();
    size_t n_writes = 0;
    while (w.taken.size() < share) {
        std::deque<job> & queue = queue_demand.empty() ? queue_background : queue_demand;
        const bool writes = is_write(queue.front().part);
        if (writes ? n_writes == max_writes : w.taken.size() - n_writes == w.idle.size()) {
            break;
        }
        n_writes += writes;
        w.taken.push_back(queue.front());
        queue.pop_front();
    }
    w.has_room = w.taken.empty() && !w.idle.empty();
    return true;
}

static void save(const transfer & t) {
    if (t.save) {
        memcpy(t.save, t.dst, t.size);
    }
}

static void copy(const transfer & t) {
    if (t.save && t.save == t.src) {
        std::swap_ranges((uint8_t *) t.dst, (uint8_t *) t.dst + t.size, (uint8_t *) t.save);
        return;
    }
    save(t);
    copy_in(t.at, t.dst, t.src, t.size);
}

void reader::work(worker & w) {
    while (take(w)) {
        for (const job & j : w.taken) {
            if (j.part.src) {
                continue;
            }
            if (!is_in_reach(j.part)) {
                finish(j, in_words([&] { return failure(j.part, *source, j.part.offset, "no file is that long"); }));
                continue;
            }
            const int32_t id = w.idle.back();
            w.idle.pop_back();
            flight & f = w.flights[id];
            f.j           = j;
            f.pos         = j.part.offset;
            f.n_fruitless = 0;
            const bool is_direct_to_dst = !is_passed_on(j.part) && source->alignment() == 1;
            if (is_direct_to_dst) {
                save(j.part);
            }
            start(w, id);
            if (!is_direct_to_dst) {
                save(j.part); // while it is read into the bounce buffer
            }
        }
        for (const job & j : w.taken) { // while the reads are under way
            if (is_write(j.part)) {
                j.part.at->write_begin(j.part.dst, j.part.src, j.part.size);
            } else if (j.part.src) {
                copy(j.part);
                finish(j, "");
            }
        }
        const storage * ended = nullptr;
        for (const job & j : w.taken) {
            if (is_write(j.part)) {
                if (j.part.at != ended) { // of all that was begun there
                    ended = j.part.at;
                    ended->write_end();
                }
                finish(j, "");
            }
        }
        const bool goes_on = !w.taken.empty() && !w.idle.empty(); // there may be more to start
        w.taken.clear();
        if (goes_on || w.idle.size() == w.flights.size()) {
            continue;
        }
        int64_t n;
        const int32_t id = w.queue->next(n);
        if (id < 0) {
            continue;
        }
        flight & f = w.flights[id];
        bool landed = true;
        std::string error = in_words([&] {
            std::string why;
            landed = land(f, n, why);
            return why;
        });
        if (landed) {
            w.idle.push_back(id);
            finish(f.j, std::move(error));
        } else {
            start(w, id);
        }
    }
}

// reads on from where the flight is
void reader::start(worker & w, int32_t id) noexcept {
    flight & f = w.flights[id];
    const transfer & t = f.j.part;
    const uint64_t align = source->alignment();
    const uint64_t begin = t.offset / align * align;
    const uint64_t last  = (t.offset + t.size + align - 1) / align * align;
    f.first = f.pos / align * align;
    uint8_t * const into = is_passed_on(t) ? f.bounce + (f.first - begin) : align > 1 ? f.bounce : (uint8_t *) t.dst + (f.pos - t.offset);
    w.queue->start(id, t.file, into, last - f.first, f.first);
}

// n: what the read gave, as read_at(). True when the part is done, or failed with an error; false: the rest is to be read.
bool reader::land(flight & f, int64_t n, std::string & error) {
    const transfer & t = f.j.part;
    const uint64_t align = source->alignment();
    const uint64_t begin = t.offset / align * align;
    const uint64_t end   = t.offset + t.size;
    if (n == -EINTR) {
        return false;
    }
    if (n < 0) {
        error = failure(t, *source, f.pos, strerror((int) -n));
        return true;
    }
    n_bytes_read.fetch_add((uint64_t) n, std::memory_order_relaxed);

    const uint64_t reached = std::min(f.first + (uint64_t) n, end);
    if (reached <= f.pos) {
        if (n == 0 || ++f.n_fruitless == n_fruitless_max) {
            error = failure(t, *source, f.pos, "the data end at offset " + std::to_string(reached) + " (was the file truncated?)");
            return true;
        }
        return false;
    }
    if (align > 1 && !is_passed_on(t)) {
        memcpy((uint8_t *) t.dst + (f.pos - t.offset), f.bounce + (f.pos - f.first), reached - f.pos);
    }
    f.pos = reached;
    if (f.pos < end) {
        return false;
    }
    if (t.convert) {
        t.convert->convert(t.dst, f.bounce + (t.offset - begin), t.size);
    } else if (t.at) {
        t.at->write(t.dst, f.bounce + (t.offset - begin), t.size);
    }
    return true;
}

void reader::finish(const job & j, std::string error) noexcept {
    if (!error.empty() && j.part.lands) {
        fill_in(j.part.at, j.part.dst, 0, j.part.size); // what computes on goes through defined values
    }
    transfer_group & group = *j.group;
    // under the lock throughout: the waiter may destroy the group as soon as it can return
    std::lock_guard<std::mutex> lock(group.mutex);
    if (!error.empty()) {
        try {
            if (!group.has_failed(j.part.tag)) {
                group.failed.push_back(j.part.tag);
            }
        } catch (const std::bad_alloc &) {
            group.all_failed = true;
        }
        if (group.first_error.empty()) {
            group.first_error = std::move(error);
        }
    }
    const bool landed = j.part.lands && j.part.lands->n_left.fetch_sub(1, std::memory_order_acq_rel) == 1;
    const bool idle   = group.n_pending.fetch_sub(1, std::memory_order_acq_rel) == 1;
    if (landed || idle) {
        group.done.notify_all();
    }
}

} // namespace moe
