#pragma once

// A file_source in memory whose reads go through a hook: short reads, errors, delays, an early end, a log.

#include "check.h"
#include "reader.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>

struct read_record {
    int32_t  file;
    uint64_t offset;
    uint64_t size;
};

// a conversion that is missed when it does not happen, or happens twice
class inverted final : public moe::conversion {
public:
    uint64_t unit() const override { return 1; }

    void convert(void * dst, const void * src, uint64_t size) const override {
        std::transform((const char *) src, (const char *) src + size, (char *) dst, [](char c) { return (char) ~c; });
    }
};

// a conversion that no mistake about its units or their order leaves unseen: each unit backwards
class backwards final : public moe::conversion {
public:
    explicit backwards(uint64_t n) : n(n) {}

    uint64_t unit() const override { return n; }

    void convert(void * dst, const void * src, uint64_t size) const override {
        CHECK_EQ(size % n, 0u);
        for (uint64_t i = 0; i < size; i += n) {
            std::reverse_copy((const char *) src + i, (const char *) src + i + n, (char *) dst + i);
        }
    }

    std::string of(const std::string & bytes) const {
        std::string out(bytes.size(), 0);
        convert(&out[0], bytes.data(), bytes.size());
        return out;
    }

private:
    const uint64_t n;
};

// Reads of a worker that has several under way: they end in any order, as io_uring's do.
class shuffled_queue final : public moe::read_queue {
public:
    explicit shuffled_queue(moe::file_source & source, int32_t depth) : source(source), depth(depth) { pending.reserve(depth); }

    void start(int32_t id, int32_t file, void * buf, uint64_t size, uint64_t offset) noexcept override {
        CHECK(id >= 0 && id < depth);
        for (const request & r : pending) {
            CHECK(r.id != id);
        }
        pending.push_back({ id, file, buf, size, offset });
    }

    int32_t next(int64_t & result) noexcept override {
        if (woken.exchange(false)) {
            return -1;
        }
        CHECK(!pending.empty());
        std::swap(pending[rnd.below(pending.size())], pending.back());
        const request r = pending.back();
        pending.pop_back();
        try {
            result = source.read_at(r.file, r.buf, r.size, r.offset);
        } catch (const std::bad_alloc &) {
            result = -ENOMEM;
        }
        return r.id;
    }

    void wake() noexcept override { woken = true; }

private:
    struct request {
        int32_t  id;
        int32_t  file;
        void   * buf;
        uint64_t size;
        uint64_t offset;
    };

    moe::file_source &   source;
    const int32_t        depth;
    std::vector<request> pending;
    std::atomic<bool>    woken { false };
    test_random          rnd { 11 };
};

class faulty_source final : public moe::file_source {
public:
    // Called before each read, from the worker's thread, no lock held. Returns the most bytes the read may give, or -errno.
    using hook_fn = std::function<int64_t(int32_t file, uint64_t size, uint64_t offset)>;

    faulty_source(std::vector<std::string> contents, uint32_t align, hook_fn hook = nullptr)
        : contents(std::move(contents)), align(align), hook(std::move(hook)) {
        for (size_t i = 0; i < this->contents.size(); ++i) {
            names.push_back("file-" + std::to_string(i) + ".gguf");
        }
    }

    const std::string & name(int32_t file) const override { return names.at(file); }
    uint32_t alignment() const override { return align; }

    std::unique_ptr<moe::read_queue> make_queue(int32_t depth) override {
        if (depth == 1) {
            return file_source::make_queue(depth);
        }
        return std::make_unique<shuffled_queue>(*this, depth);
    }

    int64_t read_at(int32_t file, void * buf, uint64_t size, uint64_t offset) override {
        // the contract of direct reads
        CHECK(size > 0);
        CHECK_EQ(offset % align, 0u);
        CHECK_EQ(size % align, 0u);
        CHECK_EQ((uintptr_t) buf % align, 0u);
        {
            std::lock_guard<std::mutex> lock(mutex);
            records.push_back({ file, offset, size });
        }
        int64_t limit = (int64_t) size;
        if (hook) {
            limit = std::min(limit, hook(file, size, offset));
        }
        if (limit < 0) {
            return limit;
        }
        const std::string & text = contents.at(file);
        const uint64_t n = offset < text.size() ? std::min((uint64_t) limit, text.size() - offset) : 0;
        memcpy(buf, text.data() + offset, n);
        return (int64_t) n;
    }

    std::vector<read_record> log() const {
        std::lock_guard<std::mutex> lock(mutex);
        return records;
    }

private:
    std::vector<std::string> contents;
    std::vector<std::string> names;
    const uint32_t           align;
    const hook_fn            hook;

    mutable std::mutex       mutex;
    std::vector<read_record> records;
};

inline std::string random_bytes(uint64_t size, uint64_t seed) {
    test_random rnd(seed);
    std::string s(size, '\0');
    for (char & c : s) {
        c = (char) rnd.next();
    }
    return s;
}

// room for bytes, poisoned, with guard bytes on both sides and any start
class guarded_buffer {
public:
    explicit guarded_buffer(uint64_t size, uint32_t skew = 0) : size(size), start(n_guard + skew), bytes(size + 2 * n_guard + skew, (char) 0xa5) {}

    char *       data()       { return bytes.data() + start; }
    const char * data() const { return bytes.data() + start; }

    bool holds(const char * expected) const { return memcmp(data(), expected, size) == 0 && guards_intact(); }

    bool guards_intact() const {
        for (uint64_t i = 0; i < bytes.size(); ++i) {
            if ((i < start || i >= start + size) && bytes[i] != (char) 0xa5) {
                return false;
            }
        }
        return true;
    }

    const uint64_t size;

private:
    static constexpr uint64_t n_guard = 64;

    const uint64_t    start;
    std::vector<char> bytes;
};
