// When a context exists: what is in force is printed with its true sizes, and slots begin to fill.

#include "model.h"

#include "llama-ext.h"
#include "llama-model.h"

#include <chrono>

namespace moe::hooks {

static double mib(uint64_t n) {
    return n / 1048576.0;
}

// Now that the true sizes are known: slots that "auto" chose must fit, or the kernel would end the program in the middle of an answer.
// Slots that were asked for are the user's business.
static void check_memory(const moe_stream & moe) {
    const moe::memory_report & m = moe.report.memory;
    const uint64_t available = moe.memory.available_bytes;
    const uint64_t in_memory = m.total() - m.device_bytes;
    const uint64_t needed    = in_memory + (8ull << 20) + in_memory / 64; // and the program itself
    if (available == 0 || needed <= available) {
        return;
    }
    const std::string what = format("%d slots a layer take %.1f MiB in all, %.1f MiB are available (%s)", moe.n_slot, mib(needed),
            mib(available), moe.memory.limited_by.c_str());
    if (moe.slots_wanted != MOE_SLOTS_AUTO) {
        LLAMA_LOG_WARN("moestream: %s: the system may swap, or end the program\n", what.c_str());
        return;
    }
    const uint64_t others = needed - m.pool_bytes;
    const int64_t  fit    = others < available ? (int64_t) ((available - others) / (m.pool_bytes / moe.n_slot)) : 0;
    throw std::runtime_error(format("--moe-slots auto: %s; hint: %s", what.c_str(), fit >= moe.report.n_expert_used ?
            format("--moe-slots %lld", (long long) fit).c_str() : "a smaller context (-c) or batch (-ub), or free memory"));
}

// dry runs may come while this goes on: they compute with whatever the slots hold
static void warm_slots(moe_stream & moe) {
    try {
        moe.stream->start_warm();
    } catch (const std::exception & e) {
        LLAMA_LOG_WARN("moestream: no thread to fill empty slots with (%s): they are filled as experts are asked for\n", e.what());
        return;
    }
    if (moe.warm_s > 0 && !moe.stream->wait_warm(std::chrono::seconds(moe.warm_s))) {
        LLAMA_LOG_WARN("moestream: not all slots are filled after %lld s (--moe-warm); the rest is filled in the background\n", (long long) moe.warm_s);
    }
}

// adds what the context takes to the report; with the first of the model's, also what the model takes
static void measure(moe_stream & moe, const llama_model & model, llama_context * ctx, bool is_first) {
    uint64_t dense        = 0;
    uint64_t device_model = 0;
    moe::memory_report & m = moe.report.memory;
    for (const auto & [buft, mb] : llama_get_memory_breakdown(ctx)) {
        dense           += moe_is_pool(buft) ? 0 : mb.model;
        m.kv_bytes      += mb.context;
        m.compute_bytes += mb.compute;
        if (!ggml_backend_buft_is_host(buft) && ggml_backend_buft_get_device(buft)) {
            device_model   += mb.model;
            m.device_bytes += mb.context + mb.compute;
        }
    }
    if (!is_first) {
        return;
    }
    for (const auto & [place, p] : moe.places) {
        dense -= std::min(dense, p.device_bytes);
        m.staging_bytes += p.staging ? moe.staging_bytes() : 0;
    }
    for (const auto & [il, tensors] : moe.layers) {
        moe.report.n_expert_used = std::max(moe.report.n_expert_used, (int32_t) model.hparams.n_expert_used(il));
        for (const file_tensor & t : tensors) {
            m.pool_bytes += ggml_nbytes(t.pool);
        }
    }
    moe.report.staging = m.staging_bytes == 0 ? "none" : moe.n_ring > 0 ? format("ring of %d", moe.n_ring) : "full width";
    m.device_bytes += device_model;
    m.ram_bytes     = moe.stream->ram_bytes();
    m.guess_bytes   = moe.guesses ? ggml_nbytes(moe.guesses) : 0;
    m.bounce_bytes  = moe.stream->bounce_bytes();
    // a mapped range spans the experts between dense weights, which are not mapped any more
    m.dense_bytes   = moe.maps_dense ? moe.dense_bytes : dense;
}

// warnings, because the tools show what the library logs from here on only
static void log_in_force(const moe_stream & moe) {
    const moe::stream_report & r = moe.report;
    LLAMA_LOG_WARN("moestream: streaming %s: %zu MoE layers, %d of %d experts a layer in slots (--moe-slots %s), %d used per token\n",
            r.model.c_str(), moe.layers.size(), r.n_slot, r.n_expert, r.slots_requested.c_str(), r.n_expert_used);
    LLAMA_LOG_WARN("moestream: reads: %s, %d in flight by %d %s (%s); policy %s; overlap %s; experts on the %s\n", r.io_mode.c_str(),
            r.io_in_flight, r.io_threads, r.io_backend == moe::io_backend_name(moe::io_backend::uring) ? "threads with io_uring" : "threads",
            r.io_reason.c_str(), r.policy.c_str(), r.overlap ? "on" : "off", r.placement.c_str());
    if (moe.map || moe.warm_s >= 0) {
        LLAMA_LOG_WARN("moestream: router map: %s, %d experts a layer pinned; warm: %s\n", moe.map ? r.map.c_str() : "none", r.map_pin, r.warm.c_str());
    }
    if (r.ram_requested != "none" || r.prefetch != "auto" || r.prefetch_reason.empty()) {
        LLAMA_LOG_WARN("moestream: RAM tier: %s, %.1f MiB; prefetch: %s%s%s\n", r.ram_requested.c_str(), mib(r.memory.ram_bytes), r.prefetch.c_str(),
                r.prefetch_reason.empty() ? "" : ", nothing is guessed: ", r.prefetch_reason.c_str());
    }
    LLAMA_LOG_WARN("moestream: kernels: experts %s, dense weights %s; same bits as %s\n", r.kernels_expert.c_str(), r.kernels_dense.c_str(),
            r.same_bits_as.c_str());
}

static void log_memory(const moe_stream & moe) {
    const moe::memory_report & m = moe.report.memory;
    LLAMA_LOG_WARN("moestream: memory: %.1f MiB = dense weights %.1f + slots %.1f + staging %.1f (%s) + RAM tier %.1f + guesses %.1f + read buffers %.1f + KV %.1f + compute %.1f\n",
            mib(m.total()), mib(m.dense_bytes), mib(m.pool_bytes), mib(m.staging_bytes), moe.report.staging.c_str(), mib(m.ram_bytes), mib(m.guess_bytes), mib(m.bounce_bytes),
            mib(m.kv_bytes), mib(m.compute_bytes));
    if (m.device_bytes > 0) {
        LLAMA_LOG_WARN("moestream: memory: %.1f MiB of it on devices\n", mib(m.device_bytes));
    }
}

} // namespace moe::hooks

using namespace moe::hooks;

void moe_context_created(const llama_model & model, llama_context * ctx) {
    moe_stream * moe = model.hparams.moe;
    if (!moe || !moe->stream) {
        return;
    }
    std::unique_lock<std::mutex> lock(moe->report_mutex);
    moe::stream_report & r = moe->report;
    const moe::memory_report before = r.memory;
    const bool is_first = before.pool_bytes == 0;
    if (is_first && r.io_mode == moe::io_mode_name(moe::io_mode::direct)) {
        moe->stream->drop_cache(); // direct reads never look at what loading left there
    }
    measure(*moe, model, ctx, is_first);
    if (is_first) {
        log_in_force(*moe);
    }
    log_memory(*moe);
    try {
        check_memory(*moe);
    } catch (const std::exception &) {
        r.memory = before; // a smaller context may do
        llama_free(ctx);
        throw;
    }
    if (is_first) {
        add_live(*moe);
    }
    lock.unlock();
    if (is_first && moe->warm_s >= 0) {
        warm_slots(*moe);
    }
}
