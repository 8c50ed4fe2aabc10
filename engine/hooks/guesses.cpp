// What guesses of the next layer's experts are made with: routers in the processor's memory, or in that of the device that makes them.

#include "model.h"

#include <cstdlib>

namespace moe::hooks {

// a weight that may be read where it is
static const ggml_tensor * find_plain(const moe_stream & moe, const std::string & name) {
    const auto it = moe.routers.find(name);
    const ggml_tensor * t = it == moe.routers.end() ? nullptr : it->second;
    return t && t->data && t->buffer && ggml_backend_buffer_is_host(t->buffer) && !is_repack(ggml_backend_buffer_get_type(t->buffer)) ? t : nullptr;
}

// [n] floats that are there, else null
static const float * find_floats(const moe_stream & moe, const std::string & name, int64_t n) {
    const ggml_tensor * t = find_plain(moe, name);
    return t && t->type == GGML_TYPE_F32 && ggml_nelements(t) == n ? (const float *) t->data : nullptr;
}

// the router of a layer that streams, for guesses in the layer before it
static moe::router_weights find_router(const moe_stream & moe, int32_t il) {
    moe::router_weights r;
    const ggml_tensor * t = find_plain(moe, format("blk.%d.ffn_gate_inp.weight", il));
    const auto n_expert = moe.layers.at(il)[0].n_expert;
    if (!t || t->ne[1] != n_expert || ggml_n_dims(t) > 2 || (t->type != GGML_TYPE_F32 && !ggml_get_type_traits(t->type)->to_float)) {
        return r;
    }
    r.rows        = (const uint8_t *) t->data;
    r.row_bytes   = t->nb[1];
    r.n_embd      = t->ne[0];
    r.n_expert    = (int32_t) n_expert;
    r.n_used      = moe.n_used_of.at(il);
    r.to_float    = t->type == GGML_TYPE_F32 ? nullptr : ggml_get_type_traits(t->type)->to_float;
    r.block_size  = ggml_blck_size(t->type);
    r.block_bytes = ggml_type_size(t->type);
    r.bias        = find_floats(moe, format("blk.%d.ffn_gate_inp.bias", il), n_expert);
    r.choice_bias = find_floats(moe, format("blk.%d.exp_probs_b.bias", il), n_expert);
    return r;
}

// a weight of the layer's router in the memory of the device that looks after its slots; null: there is none such
static ggml_tensor * router_on_device(const moe_stream & moe, int32_t il, const char * name) {
    const auto it = moe.routers.find(format("blk.%d.%s", il, name));
    ggml_tensor * t = it == moe.routers.end() ? nullptr : const_cast<ggml_tensor *>(it->second);
    return t && t->data && t->buffer && ggml_backend_buffer_get_type(t->buffer) == own_buft(moe.layers.at(il)[0].place) ? t : nullptr;
}

// of the layers whose slots devices look after; why there is nothing to guess with, empty: there is
static std::string set_up_device_guesses(moe_stream & moe) {
    int32_t n_known = 0;
    for (size_t i = 1; i < moe.device_layers.size(); ++i) { // nobody guesses the first
        moe::device_layer & l = moe.device_layers[i];
        if (!l.state || !moe.device_layers[i - 1].state || l.n_slot >= l.n_expert || moe.layers_in_order[i] != moe.layers_in_order[i - 1]) {
            continue;
        }
        const int32_t il = std::next(moe.layers.begin(), i)->first;
        ggml_tensor * t = router_on_device(moe, il, "ffn_gate_inp.weight");
        if (!t || ggml_n_dims(t) > 2 || t->ne[1] != l.n_expert || t->nb[0] != ggml_type_size(t->type) || t->ne[0] % 4 != 0 ||
                (t->type != GGML_TYPE_F32 && t->type != GGML_TYPE_F16 && t->type != GGML_TYPE_BF16)) {
            continue;
        }
        const auto floats = [&](const char * name) {
            const ggml_tensor * b = router_on_device(moe, il, name);
            return b && b->type == GGML_TYPE_F32 && ggml_nelements(b) == l.n_expert ? (const float *) b->data : nullptr;
        };
        l.router_bias = floats("ffn_gate_inp.bias");
        l.choice_bias = floats("exp_probs_b.bias");
        moe.tables[i].router = t;
        ++n_known;
    }
    return n_known > 0 ? "" : "no router of the usual name and type, every expert has a slot, or only one layer of experts";
}

void set_up_guesses(moe_stream & moe) {
    std::lock_guard<std::mutex> lock(moe.report_mutex);
    std::string & why = moe.report.prefetch_reason;
    why = moe.prefetch == moe::prefetch_kind::off ? "as asked" : !moe.overlap ? "--moe-overlap off" : moe.on_device() && !moe.by_device ? "slots on a device that the host looks after" :
        moe.n_guess == 0 && !moe.by_device ? "every expert has a slot" : "";
    if (!why.empty()) {
        return;
    }
    if (moe.by_device) {
        why = set_up_device_guesses(moe);
        return;
    }
    std::vector<moe::router_weights> routers(1); // nobody guesses the first layer
    int32_t n_known = 0;
    for (auto it = moe.layers.begin(); std::next(it) != moe.layers.end(); ++it) {
        routers.push_back(find_router(moe, std::next(it)->first));
        n_known += routers.back().rows != nullptr;
    }
    if (n_known == 0) {
        why = "the model has no routers of the usual name, or only one layer of experts";
        return;
    }
    const char * noise = getenv("MOESTREAM_GUESS_NOISE");
    moe.next_router = std::make_unique<moe::router_guess>(std::move(routers), noise ? (uint32_t) std::clamp(atoi(noise), 0, 100) : 0);
}

} // namespace moe::hooks
