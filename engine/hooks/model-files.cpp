// The model's files: how they are read, and what they are known by.

#include "model.h"

#include "uring.h"

#include "llama-mmap.h"

#include <cerrno>
#include <cstring>
#include <random>
#include <thread>

#include <unistd.h>

namespace moe::hooks {

void open_files(moe_stream & moe, const std::vector<moe::open_file> & files, std::unique_ptr<moe::file_source> & source) {
    moe::stream_report & r = moe.report;
    moe::io_wish wish = moe.io;
    std::string no_uring;
    if (wish.backend != moe::io_backend::threads && !moe::uring_works(no_uring)) {
        if (wish.backend == moe::io_backend::automatic) {
            no_uring.clear(); // nobody asked for it
        }
        wish.backend = moe::io_backend::threads;
    }
    // through the page cache only if it can hold the experts beside everything else
    uint64_t need = moe.expert_bytes + moe.dense_bytes + (moe.host_staging() ? moe.staging_bytes() : 0);
    for (const ggml_tensor * t : { moe.ram, moe.guesses }) {
        need += t ? ggml_nbytes(t) : 0;
    }
    for (const auto & [il, tensors] : moe.layers) {
        for (const file_tensor & t : tensors) {
            need += t.place == pool_buft() ? ggml_nbytes(t.pool) : 0;
        }
    }
    const bool     fits = moe.memory.available_bytes == 0 || need <= moe.memory.available_bytes;

    moe::probe_result probe;
    if (wish.mode != moe::io_mode::automatic) {
        probe.note = "--moe-io says how to read";
    } else if (fits && wish.n_in_flight > 0) {
        probe.note = "nothing is left to choose";
    } else if (moe.expert_bytes < moe::probe_bytes_min) {
        probe.note = "the experts are few";
    } else {
        moe::probe_plan plan;
        plan.buffered = !fits;
        plan.threads  = wish.backend != moe::io_backend::uring;
        plan.uring    = wish.backend != moe::io_backend::threads;
        plan.seed     = std::random_device()();
        if (wish.n_in_flight > 0) {
            plan.in_flight = { wish.n_in_flight };
        }
        std::vector<moe::probe_place> places;
        for (const auto & [il, tensors] : moe.layers) {
            for (const file_tensor & t : tensors) {
                places.push_back({ (int32_t) t.file, t.offset, t.expert_bytes, (int32_t) t.n_expert });
            }
        }
        probe = moe::probe_io(files, places, plan);
    }

    moe::io_choice choice = moe::choose_io(wish, fits, probe);
    std::string error;
    source = moe::make_file_source(files, choice.mode, error, choice.backend);
    if (!source && wish.mode == moe::io_mode::automatic && choice.mode == moe::io_mode::direct) {
        probe.direct_refusal = error; // it was not measured
        choice = moe::choose_io(wish, fits, probe);
        source = moe::make_file_source(files, choice.mode, error, choice.backend);
    }
    if (!source) {
        throw std::runtime_error(wish.mode == moe::io_mode::automatic ? error : format("--moe-io %s: %s; hint: --moe-io %s",
                moe::io_mode_name(wish.mode), error.c_str(), wish.mode == moe::io_mode::direct ? "buffered" : "direct"));
    }

    if (wish.mode != moe::io_mode::automatic) {
        r.io_reason = "as asked";
    } else if (fits) {
        r.io_reason = "the page cache can hold the experts";
    } else if (!probe.direct_refusal.empty()) {
        r.io_reason = probe.direct_refusal;
    } else {
        r.io_reason = format("%.1f GiB of experts exceed the %.1f GiB available (%s)%s", moe.expert_bytes / 1073741824.0,
                moe.memory.available_bytes / 1073741824.0, moe.memory.limited_by.c_str(),
                choice.buffered_is_faster ? ", but buffered reads are much faster" : "");
    }
    if (!no_uring.empty()) {
        r.io_reason += "; no io_uring: " + no_uring;
    }
    if (!choice.measured.empty()) {
        r.io_reason += "; measured: " + choice.measured;
    }
    r.io_requested  = moe::io_mode_name(moe.io.mode);
    r.io_mode       = moe::io_mode_name(choice.mode);
    r.io_backend    = moe::io_backend_name(choice.backend);
    r.io_in_flight  = choice.n_in_flight;
    r.io_threads    = moe::n_workers(choice.backend, choice.n_in_flight, (int32_t) std::thread::hardware_concurrency());
    r.io_probe_note = probe.note;
    for (const moe::probe_rate & p : probe.rates) {
        r.io_probe.push_back({ moe::io_mode_name(p.mode), moe::io_backend_name(p.backend), p.n_in_flight, p.bytes_per_s });
    }
}

// the loader does not keep the paths
static std::string path_of(const llama_file & file) {
#ifdef __linux__
    char path[4096];
    const std::string link = "/proc/self/fd/" + std::to_string(file.file_id());
    const ssize_t n = readlink(link.c_str(), path, sizeof(path));
    if (n > 0) {
        return std::string(path, n);
    }
#endif
    return "descriptor " + std::to_string(file.file_id());
}

std::string base_name(const std::string & path) {
    return path.substr(path.find_last_of('/') + 1);
}

std::vector<moe::open_file> descriptors_of(const llama_model_loader & ml) {
    std::vector<moe::open_file> files;
    for (const auto & file : ml.files) {
        files.push_back({ file->file_id(), path_of(*file) });
    }
    return files;
}

static uint64_t fnv1a(uint64_t h, const void * data, size_t size) {
    for (size_t i = 0; i < size; ++i) {
        h = (h ^ ((const uint8_t *) data)[i]) * 0x100000001b3u;
    }
    return h;
}

std::string fingerprint_of(const moe_stream & moe, const std::string & arch, const std::vector<moe::open_file> & files) {
    std::string error;
    const auto source = moe::make_file_source(files, moe::io_mode::buffered, error);
    if (!source) {
        throw std::runtime_error(error);
    }
    uint64_t h = fnv1a(0xcbf29ce484222325u, arch.c_str(), arch.size() + 1);
    for (const block_identity & b : moe.identity) {
        uint8_t numbers[8];
        for (int i = 0; i < 4; ++i) {
            numbers[i]     = (uint8_t) ((uint32_t) b.layer    >> (8 * i));
            numbers[i + 4] = (uint8_t) ((uint32_t) b.n_expert >> (8 * i));
        }
        h = fnv1a(h, numbers, sizeof(numbers));
        uint8_t router[4096];
        const uint64_t size = std::min<uint64_t>(b.router_bytes, sizeof(router));
        for (uint64_t n = 0; n < size; ) {
            const int64_t got = source->read_at((int32_t) b.router_file, router + n, size - n, b.router_offset + n);
            if (got == -EINTR) {
                continue;
            }
            if (got <= 0) {
                throw std::runtime_error(format("reading the router of layer %d from '%s' failed: %s", b.layer,
                        files[b.router_file].name.c_str(), got < 0 ? strerror((int) -got) : "the file ends there"));
            }
            n += (uint64_t) got;
        }
        h = fnv1a(h, router, size);
    }
    return format("%016llx", (unsigned long long) h);
}

void open_trace(moe_stream & moe, const llama_model_loader & ml, const std::vector<moe::layer_desc> & descs) {
    moe::trace_header header = { moe.report.fingerprint, ml.arch_name, moe.report.model, moe.n_used_max, {} };
    for (const moe::layer_desc & d : descs) {
        header.layers.push_back({ d.layer, d.n_expert });
    }
    static std::mutex mutex;
    static std::set<std::string> begun; // by this process
    std::lock_guard<std::mutex> lock(mutex);
    std::string error;
    moe.trace = moe::trace_writer::open(moe.files.trace, header, moe.trace_limit, begun.count(moe.files.trace) > 0, error);
    if (!moe.trace) {
        throw std::runtime_error("--moe-trace: " + error);
    }
    begun.insert(moe.files.trace);
}

} // namespace moe::hooks
