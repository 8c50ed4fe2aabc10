#pragma once

// Getting expert bytes to where they are computed with: a queue of transfers and a pool of worker threads.
//
// A transfer copies `size` bytes to `dst`, from a file (positional read) or from memory. Transfers are submitted in groups;
// whoever needs the bytes sleeps in transfer_group::wait(). Demand transfers are always taken before background ones.
// Reads larger than the chunk size are cut into even pieces, so that several workers share one and direct reads overlap in no block.
//
// Errors never throw in a worker, and none of submit(): the group remembers the first one in full (operation, file, offset, length,
// reason) and every failed tag. Memory that runs out on the way is such an error.
//
// A worker has one read under way (a thread that sleeps in pread) or several (io_uring): which is the file_source's business, whose
// read_queue takes them and tells results in any order. What becomes of the bytes is the same code for both.
//
// The files stand behind file_source, so that tests can inject short reads, errors and delays.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace moe {

// The reads that one worker has under way: that worker alone calls it, but for wake().
class read_queue {
public:
    virtual ~read_queue() = default;

    // As file_source::read_at(), without waiting for the bytes. id is the caller's: from 0 up to the queue's depth, and of no other read
    // under way. buf stays valid until the read is done.
    virtual void start(int32_t id, int32_t file, void * buf, uint64_t size, uint64_t offset) noexcept = 0;

    // sleep until one of the reads is done: its id, and in result what read_at() returns; -1: none is, but wake() was called
    virtual int32_t next(int64_t & result) noexcept = 0;

    // from any thread: next() returns soon
    virtual void wake() noexcept {}
};

class file_source {
public:
    virtual ~file_source() = default;

    virtual const std::string & name(int32_t file) const = 0;

    // as pread(2): the bytes read, possibly fewer than asked for, 0 at the end of the file, or -errno. Only -EINTR is tried again.
    virtual int64_t read_at(int32_t file, void * buf, uint64_t size, uint64_t offset) = 0;

    // offset, size and buf of read_at() must be multiples of this many bytes; 1 for buffered reads
    virtual uint32_t alignment() const = 0;

    // For one worker, with up to depth reads under way; the source outlives it. Here: read_at(), one after the other, in next().
    // Throws std::runtime_error saying why there is none.
    virtual std::unique_ptr<read_queue> make_queue(int32_t depth);

    // the files need not stay in the page cache
    virtual void drop_cache() {}
};

enum class io_mode : int32_t { automatic = 0, direct = 1, buffered = 2 };

const char * io_mode_name(io_mode mode);
bool         io_mode_from_name(const std::string & name, io_mode & out);

// how reads are kept under way: a thread for each, or the kernel's io_uring
enum class io_backend : int32_t { automatic = 0, threads = 1, uring = 2 };

const char * io_backend_name(io_backend backend);
bool         io_backend_from_name(const std::string & name, io_backend & out);

struct open_file {
    int         fd;   // borrowed: only read in make_file_source()
    std::string name; // for messages
};

// Opens every file anew through its descriptor (so that a renamed or replaced path cannot matter), without read-ahead.
// mode is direct or buffered, backend threads or uring; whether the kernel has the latter is asked of uring_works(). Returns null and says
// why in error when the file system refuses.
std::unique_ptr<file_source> make_file_source(const std::vector<open_file> & files, io_mode mode, std::string & error,
        io_backend backend = io_backend::threads);

// What a worker makes of bytes between reading them and dst: as many bytes, in the order that the kernels want. Called by several
// workers at once.
class conversion {
public:
    virtual ~conversion() = default;

    // what can be converted alone, in bytes from the start of a transfer; at most the reader's chunk size
    virtual uint64_t unit() const = 0;

    // size: a multiple of unit(). Must not throw.
    virtual void convert(void * dst, const void * src, uint64_t size) const = 0;
};

// Memory that only a device reaches, in which slots and staging may lie: whoever touches their bytes does it by one of these. Called by
// several threads at once; each call returns when it is done, and must not throw. A null pointer to one is the processor's own memory.
class storage {
public:
    virtual ~storage() = default;

    virtual void write(void * dst, const void * src, uint64_t size) const = 0;  // src is the processor's
    virtual void read (void * dst, const void * src, uint64_t size) const = 0;  // dst is the processor's
    virtual void copy (void * dst, const void * src, uint64_t size) const = 0;  // both are here
    virtual void fill (void * dst, uint8_t value, uint64_t size) const = 0;

    // several writes at once: all that the calling thread has begun here is done when write_end() returns
    virtual void write_begin(void * dst, const void * src, uint64_t size) const { write(dst, src, size); }
    virtual void write_end() const {}
};

void copy_in(const storage * at, void * dst, const void * src, uint64_t size);
void fill_in(const storage * at, void * dst, uint8_t value, uint64_t size);

// Some of a group's bytes that one can wait for alone. Not movable; lives as long as its group.
class landing {
public:
    landing() = default;
    landing(const landing &) = delete;
    landing & operator=(const landing &) = delete;

    bool is_here() const { return n_left.load(std::memory_order_acquire) == 0; }

private:
    friend class reader;

    std::atomic<int32_t> n_left { 0 }; // pieces on their way
};

struct transfer {
    int32_t      tag;    // the caller's, reported when the transfer fails
    int32_t      file;   // ignored when src is set
    uint64_t     offset; // bytes, in the file; ignored when src is set
    uint64_t     size;   // bytes
    void       * dst;
    const void * src;    // copy from memory instead of reading; null: read
    const conversion * convert = nullptr; // of what is read; null: dst gets the bytes of the file
    landing * lands = nullptr; // told when the transfer is done; a failed one is, too, and leaves zeros
    void    * save  = nullptr; // gets what dst held, before anything is written there; may be src: then both change places. Unless told
                               // otherwise by the group, also when the read fails.
    const storage * at = nullptr; // where dst, and src, are; what is read for it is not converted, and nothing of it saved
    bool src_is_ours = false; // with at: src is the processor's memory
};

// The transfers that one waits for together. May be submitted to again once it is idle. Not movable.
class transfer_group {
public:
    transfer_group() = default;
    ~transfer_group() { wait(); } // workers hold its address until its last transfer is done, and a moment longer
    transfer_group(const transfer_group &) = delete;
    transfer_group & operator=(const transfer_group &) = delete;

    bool idle() const { return n_pending.load(std::memory_order_acquire) == 0; }

    // sleep until every transfer submitted so far is done; true when all of them succeeded
    bool wait();

    // sleep until these bytes of the group are there, or have failed
    void wait(const landing & bytes);

    // valid while idle, until clear(); a tag is listed once, however many parts of it failed
    bool ok() const { return failed.empty() && !all_failed; }
    bool has_failed(int32_t tag) const;
    const std::vector<int32_t> & failed_tags() const { return failed; } // too short when memory ran out: ask has_failed()
    const std::string &          error()       const { return first_error; }

    // forget the failures; requires idle()
    void clear();

private:
    friend class reader;

    std::atomic<int64_t>    n_pending { 0 };
    std::mutex              mutex;
    std::condition_variable done;
    std::vector<int32_t>    failed;
    bool                    all_failed = false; // there was no memory to say which, so that no tag can be trusted
    std::string             first_error;
};

enum class urgency : uint8_t { demand, background };

struct aligned_free {
    void operator()(uint8_t * p) const { free(p); }
};
using aligned_buffer = std::unique_ptr<uint8_t, aligned_free>;

class reader {
public:
    // n_threads > 0, each with up to depth > 0 reads under way; chunk_size in bytes, > 0, a multiple of the source's alignment; abort()
    // otherwise. converts: some transfers do, or go to a storage. bounce: memory for the buffers of all reads, bounce_bytes_for() of it, that
    // outlives the reader; null: the reader's own. Throws std::runtime_error with a hint when not all threads start, or find no memory for
    // their buffers or queues.
    reader(std::unique_ptr<file_source> source, int32_t n_threads, uint64_t chunk_size = default_chunk_size, bool converts = false, int32_t depth = 1,
        uint8_t * bounce = nullptr);

    static uint64_t bounce_bytes_for(const file_source & source, int32_t n_in_flight, uint64_t chunk_size = default_chunk_size);

    static constexpr uint64_t default_chunk_size = 1024 * 1024;

    // transfers not yet begun fail with "the reader was stopped"
    ~reader();

    void submit(transfer_group & group, const std::vector<transfer> & transfers, urgency how) noexcept;

    // takes back what nobody has begun of what the group has left in the background: as if it were done; the bytes of that
    uint64_t cancel(transfer_group & group) noexcept;

    // somebody waits for the group now: what it has left in the background goes before all demand, in its order
    void promote(transfer_group & group) noexcept;

    void drop_cache() { source->drop_cache(); }

    int32_t  n_threads()    const { return (int32_t) threads.size(); }
    int32_t  n_in_flight()  const { return (int32_t) (workers.size() * workers.front().flights.size()); } // reads, at most
    uint64_t bounce_bytes() const { return bounces.size() * bounce_size() + bounce_bytes_given; } // memory held for direct and converted reads

    uint64_t bytes_read() const { return n_bytes_read.load(std::memory_order_relaxed); } // from files, over-reads included

private:
    struct job {
        transfer_group * group;
        transfer         part;
    };

    // a part whose read is under way
    struct flight {
        job       j;
        uint8_t * bounce;      // null when the bytes go to dst as they are
        uint64_t  pos;         // in the file: all before is in dst, or in the bounce buffer when it is to be converted
        uint64_t  first;       // where the read began
        int32_t   n_fruitless;
    };

    struct worker {
        std::unique_ptr<read_queue> queue;
        std::vector<flight>         flights; // [depth] by the id of the read
        std::vector<int32_t>        idle;    // ids of flights that are not under way
        std::vector<job>            taken;   // at most depth
        bool                        has_room = false; // sleeps in next() and could start more; guarded by mutex
    };

    static constexpr size_t max_writes = 8; // that a worker begins before it waits for them

    uint64_t bounce_size() const;
    uint64_t next_piece(const transfer & t, uint64_t pos) const;
    void work(worker & w);
    void stop();
    bool take(worker & w);
    void start(worker & w, int32_t id) noexcept;
    bool land(flight & f, int64_t n, std::string & error);
    void finish(const job & j, std::string error) noexcept;

    const std::unique_ptr<file_source> source;
    const uint64_t                     chunk_size;

    std::mutex              mutex;
    std::condition_variable wake;
    std::deque<job>         queue_demand;     // guarded by mutex
    std::deque<job>         queue_background; // guarded by mutex
    bool                    stopping = false; // guarded by mutex

    std::atomic<uint64_t>       n_bytes_read { 0 };
    std::vector<aligned_buffer> bounces; // of each flight; none for buffered reads of bytes as they are, or when they were given
    uint64_t                    bounce_bytes_given = 0;
    std::vector<worker>         workers;
    std::vector<std::thread>    threads; // of each worker
};

} // namespace moe
