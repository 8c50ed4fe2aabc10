// Around the computation of a graph.

#include "model.h"

#include "llama-model.h"

using namespace moe::hooks;

// guarded like loading: llama-server's, when it starts, is where a damaged model first computes
moe_dry_run::moe_dry_run(const llama_model * model) : model(model) {
    if (model->hparams.moe) {
        guard_begin(true);
        ++model->hparams.moe->n_dry;
    }
}

moe_dry_run::~moe_dry_run() {
    if (model->hparams.moe) {
        --model->hparams.moe->n_dry;
        guard_end(true);
    }
}

moe_compute::moe_compute(moe_stream * moe, ggml_backend_sched_t sched, uint32_t n_tokens) : moe(moe && moe->stream ? moe : nullptr), sched(sched) {
    if (this->moe) {
        this->moe->stream->compute_begin();
        if (this->moe->by_device && n_tokens <= (uint32_t) moe::device_guess_tokens && this->moe->n_dry == 0) {
            this->moe->stream->note_guess_place(n_tokens);
        }
        this->moe->tell_devices();
        open = true;
    }
}

ggml_status moe_compute::finish(ggml_status status) {
    if (!open) {
        return status;
    }
    open = false;
    // Nothing writes to a slot, or a half, in a device's memory while kernels may still read what was there before:
    //   - within a graph, by what begin() depends on. It reads the ids that a layer's router made of the results of all layers before it, and
    //     the scheduler synchronises the device to copy these ids to the processor: kernels that used the half before are done. A layer's
    //     slots are used once in a graph.
    //   - between graphs, by this: also one of another context, which has streams of its own, begins after it.
    // So copies need no order to kernels, and have their own streams.
    if (moe->on_device()) {
        ggml_backend_sched_synchronize(sched);
    }
    moe->look_at_trace(); // while nobody else computes
    std::string error = moe->stream->compute_end(status == GGML_STATUS_SUCCESS, [this] { moe->start_devices_afresh(); });
    const bool failed = !error.empty();
    if (failed) {
        LLAMA_LOG_ERROR("moestream: %s\n", error.c_str());
    }
    {
        std::lock_guard<std::mutex> lock(moe->report_mutex);
        moe->error = std::move(error);
    }
    return failed ? GGML_STATUS_FAILED : status;
}

moe_compute::~moe_compute() {
    if (open) {
        finish(GGML_STATUS_ABORTED);
    }
}
