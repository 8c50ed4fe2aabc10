#include "reader.h"

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

namespace {

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

    void drop_cache() override {
#ifdef POSIX_FADV_DONTNEED
        for (const open_file & f : files) {
            posix_fadvise(f.fd, 0, 0, POSIX_FADV_DONTNEED); // to the end; pages that are mapped stay
        }
#endif
    }

    bool open_all(const std::vector<open_file> & given, bool want_direct, std::string & error) {
        direct = want_direct;
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
    bool                   direct = false;
};

} // namespace

std::unique_ptr<file_source> make_file_source(const std::vector<open_file> & files, io_mode mode, std::string & error) {
    auto source = std::make_unique<posix_files>();
    if (!source->open_all(files, mode == io_mode::direct, error)) {
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

// what was attempted, for messages; the part of the transfer that one worker took
static std::string describe(const transfer & t, const file_source & source) {
    const std::string size = std::to_string(t.size);
    if (t.src) {
        return "copying " + size + " bytes from memory";
    }
    return "reading " + size + " bytes at offset " + std::to_string(t.offset) + " of '" + source.name(t.file) + "'";
}

// offsets are signed for the system, and rounding up to a block must not overflow
static bool is_in_reach(const transfer & t) {
    return t.offset <= INT64_MAX && t.size <= INT64_MAX - t.offset;
}

reader::reader(std::unique_ptr<file_source> source_in, int32_t n_threads, uint64_t chunk_size, bool converts)
    : source(std::move(source_in)), chunk_size(chunk_size) {
    const uint32_t align = source->alignment();
    if (n_threads <= 0 || chunk_size == 0 || align == 0 || chunk_size % align != 0) {
        fprintf(stderr, "reader: %d threads, chunk size %llu, alignment %u: impossible\n", n_threads,
            (unsigned long long) chunk_size, align);
        abort();
    }
    const std::string wanted = std::to_string(n_threads) + " threads to read experts";
    const std::string hint   = "; hint: a smaller --moe-io-threads";
    if (align > 1 || converts) {
        bounces.resize(n_threads);
        for (auto & b : bounces) {
            b.reset(allocate_aligned(bounce_size(), std::max<uint32_t>(align, 64)));
            if (!b) {
                throw std::runtime_error("no memory for the buffers of " + wanted + ", " + std::to_string(bounce_size()) + " bytes each" + hint);
            }
        }
    }
    try {
        workers.reserve(n_threads);
        for (int32_t i = 0; i < n_threads; ++i) {
            uint8_t * const bounce = bounces.empty() ? nullptr : bounces[i].get();
            workers.emplace_back([this, bounce] { work(bounce); });
        }
    } catch (const std::exception & e) {
        const size_t n_started = workers.size();
        stop();
        throw std::runtime_error("cannot start " + wanted + ", only " + std::to_string(n_started) + ": " + e.what() + hint);
    }
}

reader::~reader() {
    stop();
    for (const auto * queue : { &queue_demand, &queue_background }) {
        for (const job & j : *queue) {
            std::string error = no_memory;
            try {
                error = describe(j.part, *source) + " failed: the reader was stopped";
            } catch (const std::bad_alloc &) {
            }
            finish(j, std::move(error));
        }
    }
}

void reader::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    wake.notify_all();
    for (std::thread & w : workers) {
        w.join();
    }
    workers.clear();
}

uint64_t reader::bounce_size() const {
    return chunk_size + 2ull * source->alignment();
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
                    const uint64_t to_boundary = t.convert ? chunk_size / t.convert->unit() * t.convert->unit() : chunk_size - (t.offset + pos) % chunk_size;
                    const uint64_t size        = std::min(t.size - pos, to_boundary);
                    queue.push_back({ &group, { t.tag, t.file, t.offset + pos, size, (uint8_t *) t.dst + pos, nullptr, t.convert, t.lands } });
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

void reader::work(uint8_t * bounce) {
    while (true) {
        job j;
        {
            std::unique_lock<std::mutex> lock(mutex);
            wake.wait(lock, [this] { return stopping || !queue_demand.empty() || !queue_background.empty(); });
            if (stopping) {
                return;
            }
            std::deque<job> & queue = queue_demand.empty() ? queue_background : queue_demand;
            j = queue.front();
            queue.pop_front();
        }
        std::string error;
        if (j.part.src) {
            memcpy(j.part.dst, j.part.src, j.part.size);
        } else {
            try {
                read_part(j.part, bounce, error);
            } catch (const std::bad_alloc &) { // for the message
                error = no_memory;
            }
        }
        if (!error.empty() && j.part.lands) {
            memset(j.part.dst, 0, j.part.size); // what computes on goes through defined values
        }
        finish(j, std::move(error));
    }
}

bool reader::read_part(const transfer & t, uint8_t * bounce, std::string & error) {
    const uint64_t align = source->alignment();
    const uint64_t end   = t.offset + t.size;

    const auto fail = [&](uint64_t pos, const std::string & why) {
        error = describe(t, *source) + " failed at offset " + std::to_string(pos) + ": " + why;
        return false;
    };

    if (!is_in_reach(t)) {
        return fail(t.offset, "no file is that long");
    }

    int32_t  n_fruitless = 0;
    uint64_t pos = t.offset; // all before is in dst, or in the bounce buffer when it is to be converted
    const uint64_t begin = t.offset / align * align;
    while (pos < end) {
        const uint64_t first = pos / align * align;
        const uint64_t last  = (end + align - 1) / align * align;
        uint8_t * const dst  = (uint8_t *) t.dst + (pos - t.offset);
        uint8_t * const into = t.convert ? bounce + (first - begin) : align > 1 ? bounce : dst;

        const int64_t n = source->read_at(t.file, into, last - first, first);
        if (n == -EINTR) {
            continue;
        }
        if (n < 0) {
            return fail(pos, strerror((int) -n));
        }
        n_bytes_read.fetch_add((uint64_t) n, std::memory_order_relaxed);

        const uint64_t reached = std::min(first + (uint64_t) n, end);
        if (reached <= pos) {
            if (n == 0 || ++n_fruitless == n_fruitless_max) {
                return fail(pos, "the data end at offset " + std::to_string(reached) + " (was the file truncated?)");
            }
            continue;
        }
        if (align > 1 && !t.convert) {
            memcpy(dst, bounce + (pos - first), reached - pos);
        }
        pos = reached;
    }
    if (t.convert) {
        t.convert->convert(t.dst, bounce + (t.offset - begin), t.size);
    }
    return true;
}

void reader::finish(const job & j, std::string error) noexcept {
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
