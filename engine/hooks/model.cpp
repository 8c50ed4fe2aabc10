// What a model holds while it lives, and what programs ask of it: statistics, and why a graph failed.

#include "model.h"

#include "stats.h"

#include "llama-model.h"

#include <cstdlib>
#include <cstring>
#include <fstream>

namespace moe::hooks {

// the models that stream, the newest last
static std::mutex                             live_mutex;
static std::vector<std::weak_ptr<moe_stream>> live;

bool is_set(const char * name) {
    const char * value = getenv(name);
    return value && *value && strcmp(value, "0") != 0;
}

void add_live(moe_stream & moe) {
    std::lock_guard<std::mutex> lock(live_mutex);
    live.erase(std::remove_if(live.begin(), live.end(), [](const auto & w) { return w.expired(); }), live.end());
    live.push_back(moe.weak_from_this());
}

std::shared_ptr<moe_stream> held_by_model(const std::shared_ptr<moe_stream> & moe) {
    return { moe.get(), [moe](moe_stream * m) { m->close(); } };
}

static std::shared_ptr<moe_stream> newest() {
    std::lock_guard<std::mutex> lock(live_mutex);
    for (auto it = live.rbegin(); it != live.rend(); ++it) {
        if (auto moe = it->lock()) {
            return moe;
        }
    }
    return nullptr;
}

} // namespace moe::hooks

using namespace moe::hooks;

void moe_stream::look_at_trace() noexcept {
    try {
        const std::string notice = trace ? trace->take_notice() : "";
        if (!notice.empty()) {
            LLAMA_LOG_WARN("moestream: %s\n", notice.c_str());
        }
    } catch (const std::bad_alloc &) {
        // the graph is more important than the line
    }
}

void moe_stream::close() {
    if (!stream) {
        return;
    }
    if (trace) {
        trace->flush();
        look_at_trace();
    }
    if (const char * path = getenv("MOESTREAM_STATS_FILE")) {
        std::ofstream out(path);
        out << stats_json() << "\n";
        if (!out) {
            LLAMA_LOG_ERROR("moestream: cannot write MOESTREAM_STATS_FILE '%s'\n", path);
        }
    }
    std::lock_guard<std::mutex> lock(report_mutex);
    stream.reset(); // its workers write to the slots, which the model is about to free
    for (size_t i = 0; i < device_layers.size(); ++i) {
        if (device_layers[i].state) {
            functions_of(ggml_backend_buft_get_device(layers_in_order[i]))->release(&device_layers[i]);
        }
    }
    trace.reset();
}

std::string moe_stats_json() {
    const auto moe = newest();
    return moe ? moe->stats_json() : moe::stats_json_off();
}

std::string moe_stats_prometheus() {
    const auto moe = newest();
    if (!moe) {
        return "";
    }
    std::lock_guard<std::mutex> lock(moe->report_mutex);
    moe->fetch_device_counters();
    return moe->stream ? moe::stats_prometheus(moe->report, moe->stream->stats()) : "";
}

std::string moe_model_stats_json(const llama_model * model) {
    moe_stream * moe = model ? model->hparams.moe : nullptr;
    return moe && moe->stream ? moe->stats_json() : moe::stats_json_off();
}

size_t moe_stats_copy(const llama_model * model, char * out, size_t size) {
    try {
        const std::string json = moe_model_stats_json(model);
        if (out && size > 0) {
            const size_t n = std::min(json.size(), size - 1);
            memcpy(out, json.data(), n);
            out[n] = 0;
        }
        return json.size();
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

void moe_log_without_debug(enum ggml_log_level level, const char * text, void * user_data) {
    static thread_local bool continues_debug = false;
    if (level != GGML_LOG_LEVEL_CONT) {
        continues_debug = level == GGML_LOG_LEVEL_DEBUG;
    }
    if (!continues_debug && user_data) {
        ((ggml_log_callback) user_data)(level, text, nullptr);
    }
}

std::string moe_take_error(const llama_model * model) {
    moe_stream * moe = model ? model->hparams.moe : nullptr;
    if (!moe) {
        return "";
    }
    std::string error;
    {
        std::lock_guard<std::mutex> lock(moe->report_mutex);
        std::swap(error, moe->error);
    }
    if (error.empty()) {
        return "";
    }
    for (const std::string & path : moe->paths) {
        const size_t pos = error.find(path);
        if (pos != std::string::npos) {
            error.replace(pos, path.size(), base_name(path));
        }
    }
    return "moestream: " + error;
}

void moe_refuse(const moe_stream * moe, const char * what) {
    if (moe) {
        throw std::runtime_error(format("%s is not possible while experts are streamed (--moe-slots)", what));
    }
}
