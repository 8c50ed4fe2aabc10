#include "stats.h"

#include "json-writer.h"

namespace moe {

namespace {

struct counters {
    uint64_t hits = 0, misses = 0, evictions = 0, bytes_needed = 0, bytes_read = 0, bytes_copied = 0, stall_us = 0;
    uint64_t warm_filled = 0, warm_bytes = 0, pins = 0;
    uint64_t ram_hits = 0, bytes_from_ram = 0, bytes_to_ram = 0, guesses = 0, guess_hits = 0, guess_wasted_bytes = 0;

    void add(const layer_stats & l) {
        hits         += l.hits;
        misses       += l.misses;
        evictions    += l.evictions;
        bytes_needed += l.bytes_needed;
        bytes_read   += l.bytes_read;
        bytes_copied += l.bytes_copied;
        stall_us     += l.stall_us;
        warm_filled  += l.warm_filled;
        warm_bytes   += l.warm_bytes;
        pins         += l.pins;
        ram_hits           += l.ram_hits;
        bytes_from_ram     += l.bytes_from_ram;
        bytes_to_ram       += l.bytes_to_ram;
        guesses            += l.guesses;
        guess_hits         += l.guess_hits;
        guess_wasted_bytes += l.guess_wasted_bytes;
    }

    void write(json_object & o) const {
        o.add("hits", hits).add("misses", misses).add("evictions", evictions).add("bytes_needed", bytes_needed)
            .add("bytes_read", bytes_read).add("bytes_copied", bytes_copied).add("stall_us", stall_us)
            .add("warm_filled", warm_filled).add("warm_bytes", warm_bytes).add("pins", pins)
            .add("ram_hits", ram_hits).add("bytes_from_ram", bytes_from_ram).add("bytes_to_ram", bytes_to_ram)
            .add("guesses", guesses).add("guess_hits", guess_hits).add("guess_wasted_bytes", guess_wasted_bytes);
    }
};

} // namespace

static const char * schema = "moestream/stats/1";

std::string stats_json_off() {
    return json_object().add("schema", schema).add("streaming", false).str();
}

std::string stats_json(const stream_report & r, const stream_stats & s) {
    counters    total;
    std::string layers;
    for (const auto & l : s.layers) {
        counters one;
        one.add(*l);
        total.add(*l);
        json_object o;
        o.add("layer", l->layer).add("n_expert", l->n_expert).add("slots", l->n_slot);
        one.write(o);
        layers += (layers.empty() ? "" : ",") + o.str();
    }

    json_object totals;
    total.write(totals);
    totals.add("tokens_decode", s.tokens_decode.load()).add("tokens_prefill", s.tokens_prefill.load())
        .add("read_errors", s.read_errors.load());

    std::string rates;
    for (const stream_report::probe_figure & f : r.io_probe) {
        rates += (rates.empty() ? "" : ",") + json_object().add("mode", f.mode).add("backend", f.backend).add("in_flight", f.n_in_flight)
            .add("bytes_per_s", f.bytes_per_s).str();
    }

    const memory_report & m = r.memory;
    return json_object()
        .add("schema", schema)
        .add("streaming", true)
        .add("model", r.model)
        .add("model_fingerprint", r.fingerprint)
        .add("n_layer_moe", (int32_t) s.layers.size())
        .add("n_expert", r.n_expert)
        .add("n_expert_used", r.n_expert_used)
        .add("slots", r.n_slot)
        .add("slots_requested", r.slots_requested)
        .add("policy", r.policy)
        .raw("map", r.map.empty() ? "null" : json_object().add("name", r.map).add("pin", r.map_pin).str())
        .add("warm", r.warm)
        .raw("io", json_object().add("mode", r.io_mode).add("requested", r.io_requested).add("reason", r.io_reason)
            .add("threads", r.io_threads).add("backend", r.io_backend).add("in_flight", r.io_in_flight)
            .raw("probe", json_object().add("note", r.io_probe_note).raw("rates", "[" + rates + "]").str()).str())
        .add("overlap", r.overlap)
        .add("staging", r.staging)
        .add("ram_requested", r.ram_requested)
        .raw("prefetch", json_object().add("requested", r.prefetch).add("on", s.prefetch_on.load()).add("reason", r.prefetch_reason).str())
        .raw("gpu_path", r.gpu_path.empty() ? "null" : json_object().add("in_force", r.gpu_path).add("reason", r.gpu_path_reason).str())
        .add("placement", r.placement)
        .raw("kernels", json_object().add("experts", r.kernels_expert).add("dense", r.kernels_dense)
            .add("same_bits_as", r.same_bits_as).str())
        .raw("memory", json_object().add("pool_bytes", m.pool_bytes).add("staging_bytes", m.staging_bytes)
            .add("ram_bytes", m.ram_bytes).add("guess_bytes", m.guess_bytes)
            .add("bounce_bytes", m.bounce_bytes).add("dense_bytes", m.dense_bytes).add("kv_bytes", m.kv_bytes)
            .add("compute_bytes", m.compute_bytes).add("total_bytes", m.total()).add("device_bytes", m.device_bytes).str())
        .raw("totals", totals.str())
        .raw("layers", "[" + layers + "]")
        .str();
}

std::string stats_prometheus(const stream_report & r, const stream_stats & s) {
    std::string out;

    const auto header = [&](const char * name, const char * type, const char * help) {
        out += std::string("# HELP moestream_") + name + " " + help + "\n";
        out += std::string("# TYPE moestream_") + name + " " + type + "\n";
    };
    const auto line = [&](const std::string & name, uint64_t value) {
        out += "moestream_" + name + " " + std::to_string(value) + "\n";
    };
    const auto per_layer = [&](const char * name, const char * help, std::atomic<uint64_t> layer_stats::* field) {
        header(name, "counter", help);
        for (const auto & l : s.layers) {
            line(std::string(name) + "{layer=\"" + std::to_string(l->layer) + "\"}", ((*l).*field).load());
        }
    };

    per_layer("expert_hits_total",      "Accesses served from a slot.",                       &layer_stats::hits);
    per_layer("expert_misses_total",    "Accesses that had to be read.",                      &layer_stats::misses);
    per_layer("expert_evictions_total", "Experts that lost their slot.",                      &layer_stats::evictions);
    per_layer("bytes_needed_total",     "Bytes of all experts accessed.",                     &layer_stats::bytes_needed);
    per_layer("bytes_read_total",       "Bytes read from files.",                             &layer_stats::bytes_read);
    per_layer("bytes_copied_total",     "Bytes copied between slots and staging.",            &layer_stats::bytes_copied);
    per_layer("stall_us_total",         "Microseconds that compute waited for experts.",      &layer_stats::stall_us);

    per_layer("warm_filled_total",      "Experts that got a slot before they were asked for.", &layer_stats::warm_filled);
    per_layer("warm_bytes_total",       "Bytes read for those.",                              &layer_stats::warm_bytes);

    per_layer("ram_hits_total",         "Misses that the RAM tier had.",                      &layer_stats::ram_hits);
    per_layer("bytes_from_ram_total",   "Bytes copied from the RAM tier.",                    &layer_stats::bytes_from_ram);
    per_layer("bytes_to_ram_total",     "Bytes copied from slots to the RAM tier.",           &layer_stats::bytes_to_ram);
    per_layer("guesses_total",          "Experts read because the layer before said that they would be wanted.", &layer_stats::guesses);
    per_layer("guess_hits_total",       "Misses that had been guessed.",                      &layer_stats::guess_hits);
    per_layer("guess_wasted_bytes_total", "Bytes read for wrong guesses.",                    &layer_stats::guess_wasted_bytes);

    header("pins", "gauge", "Slots whose expert never leaves.");
    for (const auto & l : s.layers) {
        line("pins{layer=\"" + std::to_string(l->layer) + "\"}", l->pins);
    }
    header("slots", "gauge", "Expert slots of the layer.");
    for (const auto & l : s.layers) {
        line("slots{layer=\"" + std::to_string(l->layer) + "\"}", (uint64_t) l->n_slot);
    }
    header("tokens_decode_total", "counter", "Tokens computed through slots.");
    line("tokens_decode_total", s.tokens_decode);
    header("tokens_prefill_total", "counter", "Tokens computed through staging.");
    line("tokens_prefill_total", s.tokens_prefill);
    header("read_errors_total", "counter", "Failed reads of experts.");
    line("read_errors_total", s.read_errors);
    header("memory_bytes", "gauge", "Planned resident memory by use.");
    const memory_report & m = r.memory;
    line("memory_bytes{use=\"pool\"}",    m.pool_bytes);
    line("memory_bytes{use=\"staging\"}", m.staging_bytes);
    line("memory_bytes{use=\"ram\"}",     m.ram_bytes);
    line("memory_bytes{use=\"guess\"}", m.guess_bytes);
    line("memory_bytes{use=\"bounce\"}",  m.bounce_bytes);
    line("memory_bytes{use=\"dense\"}",   m.dense_bytes);
    line("memory_bytes{use=\"kv\"}",      m.kv_bytes);
    line("memory_bytes{use=\"compute\"}", m.compute_bytes);
    header("device_memory_bytes", "gauge", "What of that is in the memory of devices.");
    line("device_memory_bytes", m.device_bytes);
    return out;
}

} // namespace moe
