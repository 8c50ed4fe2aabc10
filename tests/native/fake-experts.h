#pragma once

// What a moe::stream works on, without a model: files in memory that hold the experts of a few layers at odd places, slots,
// staging halves, and a file_source with faults. Most are tied to places: an expert with a bad place, or behind the end of a
// truncated file, fails whoever reads it and however the reads are cut, so that a test can say beforehand which reads fail. Those
// of a sick thread strike anywhere, and are told afterwards.

#include "check.h"
#include "faulty-source.h"
#include "stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

struct bad_place {
    int32_t  file;
    uint64_t offset;
    int64_t  result; // what the read that comes to it gives: -errno, or 0 for a file that ends here
};

class place_source final : public moe::file_source {
public:
    place_source(const std::vector<std::string> & contents, uint32_t align, uint64_t seed) : contents(contents), align(align), seed(seed) {
        for (size_t i = 0; i < contents.size(); ++i) {
            names.push_back("file-" + std::to_string(i) + ".gguf");
        }
    }

    // set before the reads begin
    uint32_t delay_percent = 0;
    uint32_t delay_us_max  = 100;
    uint32_t short_percent = 0;
    uint32_t eintr_percent = 0;
    uint32_t sick_percent  = 0; // of the reads of whichever thread reads first; with align == 1 only, see take_lost()
    std::function<void(int32_t file, uint64_t size, uint64_t offset)> on_read; // from a worker's thread

    const std::string & name(int32_t file) const override { return names.at(file); }
    uint32_t alignment() const override { return align; }

    std::unique_ptr<moe::read_queue> make_queue(int32_t depth) override { return std::make_unique<shuffled_queue>(*this, depth); }

    int64_t read_at(int32_t file, void * buf, uint64_t size, uint64_t offset) override {
        CHECK(size > 0);
        CHECK_EQ(offset % align, 0u);
        CHECK_EQ(size % align, 0u);
        if (on_read) {
            on_read(file, size, offset);
        }
        test_random rnd(seed ^ (n_read.fetch_add(1) << 20) ^ offset);
        if (rnd.percent(delay_percent)) {
            std::this_thread::sleep_for(std::chrono::microseconds(rnd.below(delay_us_max)));
        }
        if (rnd.percent(eintr_percent)) {
            return -EINTR;
        }
        if (sick_percent > 0) {
            std::lock_guard<std::mutex> lock(mutex);
            if (sick_thread == std::thread::id()) {
                sick_thread = std::this_thread::get_id();
            }
            if (sick_thread == std::this_thread::get_id() && rnd.percent(sick_percent)) {
                const int64_t results[] = { -EIO, -EAGAIN, -ENOMEM, -EBADF, 0 };
                lost.push_back({ file, offset, results[rnd.below(5)] });
                return lost.back().result;
            }
        }
        // at least a block: less could be none of the bytes wanted, which the reader takes for the end after a few tries
        uint64_t n = rnd.percent(short_percent) ? rnd.between(align, (int64_t) size) : size;
        {
            std::lock_guard<std::mutex> lock(mutex);
            for (const bad_place & b : bad) {
                if (b.file != file || b.offset < offset || b.offset >= offset + n) {
                    continue;
                }
                n = (b.offset - offset) / align * align;
                if (n == 0 || rnd.percent(50)) { // what is before it may still come, as from pread()
                    return b.result;
                }
            }
        }
        const std::string & text = contents.at(file);
        const uint64_t      end  = std::min<uint64_t>(text.size(), ends[file]);
        n = offset < end ? std::min(n, end - offset) : 0;
        memcpy(buf, text.data() + offset, n);
        return (int64_t) n;
    }

    void set_bad(const std::vector<bad_place> & places) {
        std::lock_guard<std::mutex> lock(mutex);
        bad = places;
    }

    void truncate(int32_t file, uint64_t size) { ends[file] = size; } // to more than it had: back to what it had

    // where the sick thread's reads failed since the last call
    std::vector<bad_place> take_lost() {
        std::lock_guard<std::mutex> lock(mutex);
        std::vector<bad_place> out;
        out.swap(lost);
        return out;
    }

private:
    const std::vector<std::string> & contents;
    const uint32_t                   align;
    const uint64_t                   seed;
    std::vector<std::string>         names;
    std::atomic<uint64_t>            n_read { 0 };
    std::mutex                       mutex;
    std::vector<bad_place>           bad;  // guarded by mutex
    std::vector<bad_place>           lost; // guarded by mutex
    std::thread::id                  sick_thread; // guarded by mutex
    std::atomic<uint64_t>            ends[2] = { { UINT64_MAX }, { UINT64_MAX } };
};

struct fake_layer_shape {
    int32_t n_expert;
    int32_t n_slot;
    std::vector<uint64_t> part_bytes; // of one expert
    std::vector<int32_t>  kept = {};
    std::vector<int32_t>  warm = {};
};

// the buffers must outlive the stream
struct fake_experts {
    static constexpr int32_t n_file = 2;

    std::vector<std::string>                contents;
    std::vector<moe::layer_desc>            layers;
    std::vector<std::unique_ptr<uint8_t[]>> slots;
    std::unique_ptr<uint8_t[]>              staging;        // null when no layer needs it
    uint64_t                                half_bytes = 0;
    std::vector<std::vector<uint32_t>>      versions; // [layer][expert] of the bytes in the files

    fake_experts(const std::vector<fake_layer_shape> & shapes, uint64_t seed) {
        test_random rnd(seed);
        uint64_t end[n_file] = { 0, 0 };
        bool     staged      = false;
        for (const fake_layer_shape & shape : shapes) {
            moe::layer_desc d;
            d.layer    = (int32_t) layers.size() + 3; // block numbers are not indices: dense layers come first
            d.n_expert = shape.n_expert;
            d.n_slot   = shape.n_slot;
            d.kept     = shape.kept;
            d.warm     = shape.warm;
            uint64_t staging_offset = 0;
            for (const uint64_t bytes : shape.part_bytes) {
                const int32_t file = (int32_t) rnd.below(n_file);
                slots.push_back(std::make_unique<uint8_t[]>(bytes * d.n_slot)); // of its own: what is written beside it, ASan sees
                end[file] += rnd.percent(50) ? rnd.below(9000) : 0;
                static const inverted invert;
                d.parts.push_back({ file, end[file], bytes, slots.back().get(), staging_offset, rnd.percent(40) ? &invert : nullptr });
                end[file]      += bytes * d.n_expert;
                staging_offset += (bytes * d.n_expert + 31) / 32 * 32;
            }
            staged     = staged || d.n_slot < d.n_expert;
            half_bytes = std::max(half_bytes, staging_offset);
            layers.push_back(d);
            versions.emplace_back(d.n_expert, 0);
        }
        for (int32_t f = 0; f < n_file; ++f) {
            contents.push_back(random_bytes(end[f], seed + 1 + f));
        }
        if (staged) {
            staging = std::make_unique<uint8_t[]>(2 * half_bytes);
        }
    }

    const char * in_file(const moe::expert_part & p, int32_t expert) const {
        return contents[p.file].data() + p.offset + expert * p.expert_bytes;
    }

    // other bytes in the file from now on; while nobody reads
    void replace(int32_t i_layer, int32_t expert) {
        const uint32_t old = versions[i_layer][expert]++;
        for (const moe::expert_part & p : layers[i_layer].parts) {
            for (uint64_t i = 0; i < p.expert_bytes; ++i) {
                contents[p.file][p.offset + expert * p.expert_bytes + i] ^= mask(old) ^ mask(old + 1);
            }
        }
    }

    // where a matmul finds the row that belongs to an id
    const uint8_t * row(int32_t i_layer, const moe::expert_part & p, bool staged, int32_t id) const {
        return (staged ? staging.get() + (i_layer % 2) * half_bytes + p.staging_offset : p.slots) + id * p.expert_bytes;
    }

    bool holds(int32_t i_layer, bool staged, int32_t id, int32_t expert) const {
        return holds(i_layer, staged, id, expert, versions[i_layer][expert]);
    }

    bool holds(int32_t i_layer, bool staged, int32_t id, int32_t expert, uint32_t version) const {
        for (const moe::expert_part & p : layers[i_layer].parts) {
            if (!part_holds(i_layer, p, row(i_layer, p, staged, id), expert, version)) {
                return false;
            }
        }
        return true;
    }

    bool part_holds(int32_t i_layer, const moe::expert_part & p, const uint8_t * bytes, int32_t expert, uint32_t version) const {
        const uint8_t diff = mask(version) ^ mask(versions[i_layer][expert]) ^ (p.convert ? 0xff : 0);
        const char *  file = in_file(p, expert);
        return std::equal(bytes, bytes + p.expert_bytes, file, [diff](uint8_t a, char b) { return a == ((uint8_t) b ^ diff); });
    }

    bool is_zero(int32_t i_layer, bool staged, int32_t id) const { return all_parts_are(i_layer, staged, id, 0); }

    bool is_poison(int32_t i_layer, bool staged, int32_t id) const { return all_parts_are(i_layer, staged, id, 0xff); }

private:
    static uint8_t mask(uint32_t version) { return (uint8_t) (version * 0x9d); }

    bool all_parts_are(int32_t i_layer, bool staged, int32_t id, uint8_t value) const {
        for (const moe::expert_part & p : layers[i_layer].parts) {
            const uint8_t * bytes = row(i_layer, p, staged, id);
            if (std::any_of(bytes, bytes + p.expert_bytes, [value](uint8_t b) { return b != value; })) {
                return false;
            }
        }
        return true;
    }
};

// ids as a graph may lay them out: packed, tokens apart (a view of a sort), or transposed; what is between is no valid id
struct id_layout {
    std::vector<int32_t> data;
    moe::chosen_experts  chosen;

    id_layout(const std::vector<std::vector<int32_t>> & by_token, test_random & rnd) {
        const int64_t n_tokens = (int64_t) by_token.size();
        const int64_t n_used   = (int64_t) by_token[0].size();
        const bool    packed     = rnd.percent(40);
        const bool    transposed = rnd.percent(30);
        const int64_t inner = packed ? 1 : rnd.between(1, 3);
        const int64_t outer = inner * (transposed ? n_tokens : n_used) + (packed ? 0 : rnd.between(0, 5));
        const int64_t step_used  = transposed ? outer : inner;
        const int64_t step_token = transposed ? inner : outer;
        data.assign((n_used - 1) * step_used + (n_tokens - 1) * step_token + 1, INT32_MAX);
        for (int64_t t = 0; t < n_tokens; ++t) {
            for (int64_t k = 0; k < n_used; ++k) {
                data[t * step_token + k * step_used] = by_token[t][k];
            }
        }
        chosen = { (const uint8_t *) data.data(), n_used, n_tokens, (uint64_t) step_used * 4, (uint64_t) step_token * 4 };
    }
};
