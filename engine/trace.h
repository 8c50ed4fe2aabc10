#pragma once

// The routing trace: which experts the router chose, one record for each MoE layer of each batch (docs/traces.md).
//
// Writing never breaks an answer, never throws and allocates nothing: the first error, and the limit, end the recording, and take_notice()
// says so once. What is in the file is then whole records. One thread at a time.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moe {

constexpr char     trace_magic[9]     = "MOETRACE"; // 8 bytes in the file
constexpr uint32_t trace_version      = 1;
constexpr uint64_t trace_prefix_bytes = 16;         // magic, version, length of the header
constexpr uint64_t trace_record_bytes = 8;          // of a record, before its ids

inline uint64_t trace_id_bytes(int32_t n_expert) { return n_expert <= 256 ? 1 : 2; }

struct trace_layer {
    int32_t layer;    // the block number in the model
    int32_t n_expert;
};

struct trace_header {
    std::string fingerprint;  // of the model
    std::string architecture;
    std::string name;         // the file's, without its folders
    int32_t     n_expert_used; // the most of any layer
    std::vector<trace_layer> layers;

    std::string json() const;
};

class trace_writer {
public:
    // Creates the file, or empties it when it holds a trace; with append it goes on behind one of the same header. limit: bytes of the
    // file that no record passes. Null, and why in error, when that cannot be done, or the file holds something else.
    static std::unique_ptr<trace_writer> open(const std::string & path, const trace_header & header, uint64_t limit, bool append, std::string & error);
    ~trace_writer();
    trace_writer(const trace_writer &) = delete;
    trace_writer & operator=(const trace_writer &) = delete;

    // at(token, k): the id of expert k of a token, which the layer has
    template <typename at_t>
    void record(int32_t i_layer, int64_t n_used, int64_t n_tokens, const at_t & at) noexcept {
        const uint64_t id_bytes = trace_id_bytes(layers[i_layer].n_expert);
        if (!begin_record(i_layer, n_used, n_tokens, id_bytes)) {
            return;
        }
        for (int64_t t = 0; t < n_tokens; ++t) {
            for (int64_t k = 0; k < n_used; ++k) {
                put((uint32_t) at(t, k), id_bytes);
            }
        }
    }

    void flush() noexcept;

    // why the recording ended, once, for the log; empty while it goes on
    std::string take_notice();

private:
    trace_writer(int fd, const std::string & path, const trace_header & header, uint64_t limit);

    bool begin_record(int32_t i_layer, int64_t n_used, int64_t n_tokens, uint64_t id_bytes) noexcept;
    void put(uint32_t value, uint64_t n_bytes) noexcept; // little-endian
    bool write_all(const uint8_t * data, uint64_t size) noexcept;
    void write_buffer() noexcept;

    const int                      fd;
    const std::string              path;
    const std::vector<trace_layer> layers;
    const uint64_t                 limit;

    std::vector<uint8_t> buffer;
    size_t   n_buffered  = 0;
    uint64_t n_written   = 0;     // bytes in the file
    uint64_t n_whole     = 0;     // of them, up to where a record ends
    bool     ended       = false;
    bool     noticed     = false;
    int      error_number = 0;    // of the write that failed; 0: the limit
};

} // namespace moe
