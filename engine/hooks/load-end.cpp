// When all tensors have memory: connects slots, staging and files, and starts the readers.

#include "model.h"

#include "ggml-backend-impl.h"

namespace moe::hooks {

// A tensor struct like the pool's, but full width, inside staging; parity picks the half. With a ring its rows are nowhere: kernels get
// each matrix from the gate, and the first n_slot rows are the pool's, for ids of rows with any bytes.
static ggml_tensor * make_twin(moe_stream & moe, const ggml_tensor & staging, const file_tensor & t, int32_t parity) {
    ggml_tensor * twin = ggml_new_tensor_3d(moe.ctx_staging.get(), t.pool->type, t.pool->ne[0], t.pool->ne[1], t.n_expert);
    ggml_format_name(twin, "%s.staging", t.name.c_str());
    const uint64_t offset = parity * moe.half_bytes + t.staging_offset;
    if (moe.n_ring > 0) {
        twin->buffer = t.pool->buffer;
        twin->data   = t.pool->data;
        if (t.repack && twin->data) {
            ggml_backend_buffer_init_tensor(twin->buffer, twin);
        }
    } else if (staging.data) {
        ggml_backend_tensor_alloc(t.repack ? moe.repack_view.get() : staging.buffer, twin, (char *) staging.data + offset);
    } else {
        twin->buffer = staging.buffer; // the memory-fit pass
    }
    return twin;
}

static const void * gate_take(const moe_gate * gate, int32_t step, int ith, int n_thread) {
    const part_gate * g = (const part_gate *) gate;
    return g->moe->stream->take(g->i_layer, g->staged, g->part, step, ith, n_thread);
}

// layers and their parts in order
static void add_gate(moe_stream & moe, const ggml_tensor * w, int32_t i_layer, int32_t part, bool staged) {
    part_gate & g = moe.gates[w];
    g.order   = nullptr;
    g.n_order = 0;
    g.take    = gate_take;
    g.moe     = &moe;
    g.i_layer = i_layer;
    g.part    = part;
    g.staged  = staged;
    moe.layer_gates[2 * i_layer + staged].push_back(&g);
}

// in which the pools of a place are
static ggml_backend_buffer_t buffer_of(const moe_stream & moe, ggml_backend_buffer_type_t place) {
    for (const auto & [il, tensors] : moe.layers) {
        if (tensors[0].place == place) {
            return tensors[0].pool->buffer;
        }
    }
    GGML_ABORT("no pool in a place");
}

// what the map says of a layer that the model uses: the pinned experts, and the order of warm fills
static void apply_map(const moe_stream & moe, moe::layer_desc & d) {
    std::vector<int32_t> by_use;
    if (moe.map) {
        const moe::map_layer * l = moe.map->find(d.layer);
        if (!l) {
            throw std::runtime_error(format("--moe-map %s: layer %d is missing; hint: make a map of this model (moestream map make)", moe.files.map, d.layer));
        }
        by_use = l->by_use();
        for (int32_t i = 0; i < moe.map_pin && l->counts[by_use[i]] > 0; ++i) {
            d.kept.push_back(by_use[i]);
        }
    }
    for (int32_t i = 0; i < d.n_slot && moe.warm_s >= 0; ++i) {
        d.warm.push_back(moe.map ? by_use[i] : i);
    }
}

// all experts of the layer, as a warm fill brings them
static std::vector<int32_t> warm_order(const moe_stream & moe, const moe::layer_desc & d) {
    if (const moe::map_layer * l = moe.map ? moe.map->find(d.layer) : nullptr) {
        return l->by_use();
    }
    std::vector<int32_t> order(d.n_expert);
    for (int32_t e = 0; e < d.n_expert; ++e) {
        order[e] = e;
    }
    return order;
}

// what buffers are, and what of them is on devices
static void settle_places(moe_stream & moe) {
    for (auto & [buft, place] : moe.places) {
        if (!is_device_pool(buft)) {
            continue;
        }
        ggml_backend_buffer_t buffer = buffer_of(moe, buft);
        buffer->buft = own_buft(buft); // also of the memory-fit pass, whose scheduler must know where these tensors are
        place.device_bytes = ggml_backend_buffer_get_size(buffer);
        if (!is_in_host(buft)) {
            place.at = memory_of(buffer);
        }
    }
}

// t's rows are of the type that its kernels want
static void settle_repacking(moe_stream & moe, file_tensor & t) {
    if (!t.repack || !t.pool->data) {
        return;
    }
    if (!moe.repack_view) {
        moe.repack_view.reset(make_repack_view(t.pool->buffer, t.repack));
    }
    t.pool->buffer = moe.repack_view.get();
    ggml_backend_buffer_init_tensor(t.pool->buffer, t.pool);
    t.convert = repacking_of(*t.pool);
}

// Makes twins and gates of the next layer, and adds its shape. n_slab: of the layer, in the RAM tier of a device that looks after its slots.
static moe::layer_desc connect_layer(moe_stream & moe, int32_t il, std::vector<file_tensor> & tensors, int32_t n_slab,
        std::unordered_map<const ggml_tensor *, ggml_prec> & prec) {
    const int32_t i_layer = (int32_t) moe.shapes.size();
    const expert_place & place = moe.places.at(tensors[0].place);
    const bool on_device   = is_device_pool(tensors[0].place);
    const bool is_resident = moe.resident.count(il) > 0;
    int64_t n_slot_tokens  = INT64_MAX;
    moe.layer_gates.resize(2 * i_layer + 2);

    moe::layer_desc d;
    d.layer    = il;
    d.n_expert = (int32_t) tensors[0].n_expert;
    d.n_slot   = (int32_t) tensors[0].pool->ne[2];
    for (file_tensor & t : tensors) {
        settle_repacking(moe, t);
        const int32_t part = (int32_t) d.parts.size();
        d.parts.push_back({ (int32_t) t.file, t.offset, t.expert_bytes, (uint8_t *) t.pool->data, t.staging_offset, t.convert.get(), t.pad_bytes });
        moe.i_layer_of[t.pool] = i_layer;
        if (on_device) { // only the processor's kernels know gates
            const ggml_backend_dev_t dev = ggml_backend_buft_get_device(own_buft(t.place));
            n_slot_tokens = std::min<int64_t>(n_slot_tokens, functions_of(dev)->slot_tokens(dev, t.pool->type));
        } else {
            add_gate(moe, t.pool, i_layer, part, false);
        }
        if (place.staging) {
            t.staging = make_twin(moe, *place.staging, t, i_layer % 2);
            moe.staging_of[t.pool] = t.staging;
            if (!on_device) {
                add_gate(moe, t.staging, i_layer, part, true);
            }
            const auto it = prec.find(t.pool);
            if (it != prec.end()) {
                prec.emplace(t.staging, it->second);
            }
        }
    }
    apply_map(moe, d);
    d.at        = place.at.get();
    d.staging   = on_device && place.staging ? (uint8_t *) place.staging->data : nullptr;
    d.by_device = on_device && (moe.by_device || is_resident);
    if (is_resident) {
        d.warm.clear();
    } else if (d.by_device) { // one node maps so many ids, and all that may be missing must be in slabs at once
        n_slot_tokens = std::min<int64_t>(n_slot_tokens, std::min(moe::device_max_ids, n_slab) / std::max(1, moe.n_used_of[il]));
        if (!d.warm.empty()) { // by use, or by number: all of them
            d.warm = warm_order(moe, d);
        }
    }
    moe.shapes.push_back({ d.n_expert, d.n_free_slot(), n_slot_tokens, on_device, is_resident });
    return d;
}

static std::string slots_as_asked(int64_t n) {
    switch (n) {
        case MOE_SLOTS_ALL:  return "all";
        case MOE_SLOTS_AUTO: return "auto";
        case MOE_SLOTS_MAP:  return "map";
        default:             return std::to_string(n);
    }
}

// where experts are computed, and by which kernels
static void report_kernels(moe_stream & moe, const llama_model_loader & ml) {
    size_t n_tensors    = 0;
    size_t n_repacked   = 0;
    bool   unlike_stock = false;
    std::map<std::string, size_t> n_layers_on;
    for (const auto & [il, tensors] : moe.layers) {
        for (const file_tensor & t : tensors) {
            n_tensors   += 1;
            n_repacked  += t.repack != nullptr;
            unlike_stock = unlike_stock || t.is_unlike_stock;
        }
        const ggml_backend_buffer_type_t place = tensors[0].place;
        n_layers_on[is_device_pool(place) ? ggml_backend_buft_name(own_buft(place)) : "cpu"] += 1;
    }
    moe::stream_report & r = moe.report;
    for (const auto & [where, n] : n_layers_on) {
        r.placement += (r.placement.empty() ? "" : ", ") + where + (n_layers_on.size() > 1 ? format(" (%zu layers)", n) : "");
    }
    r.kernels_expert = n_repacked == 0 ? "plain" : n_repacked == n_tensors ? "repacked" : "repacked and plain";
    r.kernels_dense  = "plain";
    for (const auto & [key, ctx] : ml.ctx_map) {
        if (std::string(ggml_backend_buft_name(key.buft)).find("REPACK") != std::string::npos) {
            r.kernels_dense = "repacked";
        }
    }
    r.same_bits_as = unlike_stock ? "no stock llama.cpp: it would use kernels that streamed experts cannot (--no-repack avoids them)" :
        moe.extra_bufts ? "stock llama.cpp" : "stock llama.cpp with --no-repack";
    if (moe.with_devices && !unlike_stock) { // devices are not lent to what is in the processor's memory
        r.same_bits_as += moe.extra_bufts ? " with --no-op-offload" : " --no-op-offload";
    }
}

static void report_settings(moe_stream & moe) {
    moe::stream_report & r = moe.report;
    r.n_slot          = moe.n_slot;
    r.slots_requested = slots_as_asked(moe.slots_wanted);
    r.policy          = moe::policy_name(moe.policy);
    r.map             = moe.map ? base_name(moe.files.map) : "";
    r.map_pin         = moe.map_pin;
    r.warm            = moe.warm_s < 0 ? "off" : moe.warm_s == 0 ? "background" : std::to_string(moe.warm_s) + " s";
    r.overlap         = moe.overlap;
    r.ram_requested   = moe.ram_wanted == MOE_RAM_AUTO ? "auto" : moe.ram_wanted > 0 ? std::to_string(moe.ram_wanted) :
        moe.by_device && !moe.ram_given ? "default" : "none";
    r.prefetch        = moe.prefetch == moe::prefetch_kind::automatic ? "auto" : moe.prefetch == moe::prefetch_kind::on ? "on" : "off";
    for (const layer_shape & s : moe.shapes) {
        r.n_expert = std::max(r.n_expert, s.n_expert);
    }
}

static moe::stream::options stream_options(const moe_stream & moe) {
    moe::stream::options opt;
    opt.policy     = moe.policy;
    opt.poison     = is_set("MOESTREAM_POISON");
    opt.check      = is_set("MOESTREAM_CHECK");
    opt.staging    = moe.host_staging() ? (uint8_t *) moe.host_staging()->data : nullptr;
    opt.half_bytes = moe.half_bytes;
    opt.n_ring     = moe.n_ring;
    opt.ring_bytes = moe.ring_bytes;
    opt.ram        = moe.ram ? (uint8_t *) moe.ram->data : nullptr;
    opt.ram_bytes  = moe.ram_budget;
    opt.trace      = moe.trace.get();
    if (moe.guesses) {
        opt.guesses     = (uint8_t *) moe.guesses->data;
        opt.guess_bytes = moe.guess_bytes;
        opt.n_guess     = moe.n_guess;
        opt.prefetch    = moe.prefetch;
    }
    if (moe.by_device) {
        opt.device         = tier_options(moe, opt.poison);
        opt.device_guesses = moe.guesses_possible();
        opt.prefetch       = moe.prefetch;
    }
    return opt;
}

static std::unique_ptr<moe::reader> make_reader(moe_stream & moe, std::unique_ptr<moe::file_source> source) {
    const moe::stream_report & r = moe.report;
    const int32_t depth  = r.io_in_flight / r.io_threads;
    uint8_t * const bounce = make_bounce(moe, *source, r.io_threads * depth);
    return std::make_unique<moe::reader>(std::move(source), r.io_threads, moe::reader::default_chunk_size, r.kernels_expert != "plain" || moe.on_device(),
            depth, bounce);
}

// opens the files anew where io_uring has let it down
static std::unique_ptr<moe::reader> start_reader(moe_stream & moe, const std::vector<moe::open_file> & files, std::unique_ptr<moe::file_source> source) {
    try {
        return make_reader(moe, std::move(source));
    } catch (const std::exception & e) {
        if (moe.io.backend != moe::io_backend::automatic || moe.report.io_backend != moe::io_backend_name(moe::io_backend::uring)) {
            throw;
        }
        // one ring was possible when the drive was measured, several are not
        moe.io.backend = moe::io_backend::threads;
        open_files(moe, files, source);
        moe.report.io_reason += std::string("; no io_uring: ") + e.what();
        return make_reader(moe, std::move(source));
    }
}

} // namespace moe::hooks

using namespace moe::hooks;

void moe_load_end(moe_stream * moe, llama_model_loader & ml, std::unordered_map<const ggml_tensor *, ggml_prec> & prec) {
    if (!moe) {
        return;
    }
    size_t n_tensors = 0;
    for (const auto & [il, tensors] : moe->layers) {
        n_tensors += tensors.size();
    }
    moe->ctx_staging.reset(ggml_init({ ggml_tensor_overhead() * (n_tensors + 1), nullptr, true }));
    settle_places(*moe);
    std::unique_ptr<moe::ram_tier> slabs;
    if (moe->by_device) {
        make_tables(*moe);
        moe->ram_budget = ml.no_alloc ? device_ram_budget(*moe) : moe->ram_budget;
        slabs = std::make_unique<moe::ram_tier>(moe::device_tier::plan(tier_layers(*moe), moe->ram_budget));
    }
    std::vector<moe::layer_desc> descs;
    for (auto & [il, tensors] : moe->layers) {
        descs.push_back(connect_layer(*moe, il, tensors, slabs ? slabs->n_slab_for((int32_t) descs.size()) : 0, prec));
    }
    if (ml.no_alloc) {
        return;
    }

    const std::vector<moe::open_file> files = descriptors_of(ml);
    for (const moe::open_file & file : files) {
        moe->paths.push_back(file.name);
    }
    std::unique_ptr<moe::file_source> source;
    open_files(*moe, files, source);
    moe->report.model = base_name(files[0].name);
    if (moe->report.fingerprint.empty()) { // else it was known for the router map
        moe->report.fingerprint = fingerprint_of(*moe, ml.arch_name, files);
    }
    report_settings(*moe);
    report_kernels(*moe, ml);
    if (moe->files.trace) {
        open_trace(*moe, ml, descs);
    }
    const moe::stream::options opt = stream_options(*moe);
    moe->stream = std::make_unique<moe::stream>(opt, descs, start_reader(*moe, files, std::move(source)));
    if (moe->by_device) {
        fill_tables(*moe, descs, opt.check);
    }
    for (size_t i = 0; i < descs.size(); ++i) {
        if (moe->shapes[i].is_resident) {
            moe->stream->fill_all((int32_t) i);
        }
    }
}
