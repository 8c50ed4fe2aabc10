#pragma once

// What the programs share that run the same llama calls without and with streaming: arguments, models, recorded outputs, verdicts.

#include "llama.h"
#include "moe-api.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace replay {

struct model_free   { void operator()(llama_model   * m) const { llama_model_free(m); } };
struct context_free { void operator()(llama_context * c) const { llama_free(c); } };
using model_ptr   = std::unique_ptr<llama_model, model_free>;
using context_ptr = std::unique_ptr<llama_context, context_free>;

inline std::vector<std::string> split(const std::string & s) {
    std::vector<std::string> out;
    for (size_t pos = 0; pos < s.size(); ) {
        const size_t end = std::min(s.find(',', pos), s.size());
        out.push_back(s.substr(pos, end - pos));
        pos = end + 1;
    }
    return out;
}

struct options {
    std::string model;
    std::vector<std::string> slots = { "used", "used+1", "all" };
    std::vector<std::string> loras;
    int      n_steps   = 40;
    int      n_threads = 1;
    int      n_gpu_layers = 0;
    uint32_t seed      = 1;
    bool     load_mtp  = false;
    std::vector<llama_model_kv_override> moe;
};

inline options parse(int argc, char ** argv) {
    options o;
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        if (moe_parse_flag(argc, argv, i, o.moe)) {
            continue;
        }
        if (i + 1 >= argc) {
            throw std::invalid_argument("argument '" + arg + "' is unknown or needs a value");
        }
        const std::string value = argv[++i];
        if      (arg == "-m")        { o.model     = value; }
        else if (arg == "--slots")   { o.slots     = split(value); }
        else if (arg == "--lora")    { o.loras     = split(value); }
        else if (arg == "--steps")   { o.n_steps   = std::stoi(value); }
        else if (arg == "--threads") { o.n_threads = std::stoi(value); }
        else if (arg == "--gpu-layers") { o.n_gpu_layers = std::stoi(value); }
        else if (arg == "--seed")    { o.seed      = std::stoul(value); }
        else { throw std::invalid_argument("unknown argument '" + arg + "'"); }
    }
    if (o.model.empty()) {
        throw std::invalid_argument("no model given (-m)");
    }
    return o;
}

// an integer field of the stats JSON; the first occurrence behind `after`
inline uint64_t field(const std::string & json, const std::string & key, const std::string & after = "") {
    const size_t start = after.empty() ? 0 : json.find("\"" + after + "\"");
    const size_t pos   = start == std::string::npos ? start : json.find("\"" + key + "\":", start);
    if (pos == std::string::npos) {
        throw std::runtime_error("no field '" + key + "' in " + json.substr(0, 200));
    }
    return std::stoull(json.substr(pos + key.size() + 3));
}

// slots: "" is streaming off. Without a mapping, so that a file may be cut short under the model.
inline model_ptr load(const options & o, const std::string & slots) {
    std::vector<llama_model_kv_override> overrides;
    if (!slots.empty()) { // the other flags are refused where nothing is streamed
        overrides = o.moe;
        moe_flags()[0].apply(overrides, slots);
    }
    llama_model_params params = llama_model_default_params();
    params.use_extra_bufts = false; // plain kernels on both sides
    params.n_gpu_layers    = o.n_gpu_layers;
    params.load_mode       = LLAMA_LOAD_MODE_NONE;
    params.load_mtp        = o.load_mtp;
    params.kv_overrides    = moe_overrides_data(overrides);
    model_ptr model(llama_model_load_from_file(o.model.c_str(), params));
    if (!model) {
        throw std::runtime_error("cannot load '" + o.model + "' with slots '" + slots + "'");
    }
    return model;
}

inline context_ptr make_context(llama_model * model, llama_context_params params) {
    params.op_offload = false; // what is on the processor stays there while experts are streamed; without devices it means nothing
    context_ptr ctx(llama_init_from_model(model, params));
    if (!ctx) {
        throw std::runtime_error("cannot create a context");
    }
    return ctx;
}

// "used" and "used+N" as a number of slots
inline std::string resolve_slots(const options & o, const std::string & slots) {
    if (slots.rfind("used", 0) != 0) {
        return slots;
    }
    const model_ptr probe = load(o, "all");
    const context_ptr ctx = make_context(probe.get(), llama_context_default_params());
    const uint64_t n_used = field(moe_model_stats_json(probe.get()), "n_expert_used", "streaming");
    return std::to_string(n_used + (slots == "used" ? 0 : std::stoi(slots.substr(5))));
}

// has a state that cannot go back by some tokens
inline bool is_recurrent(const llama_model * model) {
    return llama_model_is_recurrent(model) || llama_model_is_hybrid(model);
}

// one thing that a run put out
struct output {
    std::string          what;
    std::vector<uint8_t> bytes;
};

struct outputs {
    std::vector<output> all;

    void add(const std::string & what, const void * data, size_t n_bytes) {
        const uint8_t * p = (const uint8_t *) data;
        all.push_back({ what, { p, p + n_bytes } });
    }
    void add(const std::string & what, int64_t value) { add(what, &value, sizeof(value)); }
    void add(const std::string & what, const std::vector<uint8_t> & bytes) { all.push_back({ what, bytes }); }

    size_t n_bytes() const {
        size_t n = 0;
        for (const output & o : all) {
            n += o.bytes.size();
        }
        return n;
    }
};

// what differs first, or ""
inline std::string difference(const outputs & expected, const outputs & actual) {
    for (size_t i = 0; i < std::min(expected.all.size(), actual.all.size()); ++i) {
        const output & e = expected.all[i];
        const output & a = actual.all[i];
        if (e.what != a.what) {
            return "output " + std::to_string(i) + " is of '" + a.what + "', not of '" + e.what + "'";
        }
        if (e.bytes.size() != a.bytes.size() || memcmp(e.bytes.data(), a.bytes.data(), e.bytes.size()) != 0) {
            size_t d = 0;
            while (d < std::min(e.bytes.size(), a.bytes.size()) && e.bytes[d] == a.bytes[d]) {
                ++d;
            }
            std::string text = "output " + std::to_string(i) + " (" + e.what + ") differs at byte " + std::to_string(d) + " of " +
                std::to_string(e.bytes.size()) + "; there are " + std::to_string(a.bytes.size());
            const size_t at = d / sizeof(float) * sizeof(float);
            if (at + sizeof(float) <= std::min(e.bytes.size(), a.bytes.size())) {
                float values[2]; // what they are, when it is logits
                memcpy(&values[0], e.bytes.data() + at, sizeof(float));
                memcpy(&values[1], a.bytes.data() + at, sizeof(float));
                text += ", as floats " + std::to_string(values[1]) + " instead of " + std::to_string(values[0]);
            }
            size_t n = 0;
            for (size_t k = i; k < std::min(expected.all.size(), actual.all.size()); ++k) {
                n += expected.all[k].bytes != actual.all[k].bytes;
            }
            return text + "; " + std::to_string(n) + " of " + std::to_string(expected.all.size()) + " outputs differ";
        }
    }
    return expected.all.size() == actual.all.size() ? "" : "the number of outputs differs";
}

// The same logits everywhere would be equal in any engine. Rows that are named "logits".
inline bool is_informative(const outputs & run) {
    bool varies = false;
    for (const output & o : run.all) {
        if (o.what.find("logits") == std::string::npos) {
            continue;
        }
        const float * x = (const float *) o.bytes.data();
        for (size_t i = 0; i < o.bytes.size() / sizeof(float); ++i) {
            if (x[i] != x[i]) {
                return false;
            }
            varies = varies || x[i] != x[0];
        }
    }
    return varies;
}

// Counts the nodes that a graph has computed, and does something at one of them. Install with llama_set_abort_callback().
struct interrupt {
    int64_t n_nodes = 0;
    int64_t at      = -1;             // after this many nodes; -1: never
    std::function<bool()> action;     // true: the graph ends here

    void arm(int64_t n, std::function<bool()> what) {
        n_nodes = 0;
        at      = n;
        action  = std::move(what);
    }
    void disarm() { arm(-1, nullptr); }

    static bool callback(void * data) {
        interrupt & self = *(interrupt *) data;
        return ++self.n_nodes == self.at && self.action();
    }
};

struct batch_token {
    llama_token  id;
    llama_pos    pos;
    llama_seq_id seq;
    bool         wanted; // its logits
};
using token_list = std::vector<batch_token>;

inline int decode(llama_context * ctx, const token_list & tokens) {
    llama_batch batch = llama_batch_init((int32_t) tokens.size(), 0, 1);
    for (const batch_token & t : tokens) {
        const int32_t i = batch.n_tokens++;
        batch.token[i]     = t.id;
        batch.pos[i]       = t.pos;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = t.seq;
        batch.logits[i]    = t.wanted;
    }
    const int status = llama_decode(ctx, batch);
    llama_batch_free(batch);
    return status;
}

inline void add_logits(outputs & out, llama_context * ctx, const token_list & tokens, const std::string & what) {
    const size_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    for (size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i].wanted) {
            out.add(what + ": logits", llama_get_logits_ith(ctx, (int32_t) i), n_vocab * sizeof(float));
        }
    }
}

inline std::vector<uint8_t> seq_state(llama_context * ctx, llama_seq_id seq) {
    std::vector<uint8_t> bytes(llama_state_seq_get_size(ctx, seq));
    bytes.resize(llama_state_seq_get_data(ctx, bytes.data(), bytes.size(), seq));
    return bytes;
}

// main() of the programs. Tests provoke errors, so what the library says about these is shown only when one fails.
inline int run_main(int argc, char ** argv, int (*test)(const options &), bool load_mtp = false) {
    static std::mutex  mutex;
    static std::string errors;
    int result = 2;
    try {
        options o = parse(argc, argv);
        o.load_mtp = load_mtp;
        llama_log_set([](ggml_log_level level, const char * text, void *) {
            if (level >= GGML_LOG_LEVEL_ERROR && level != GGML_LOG_LEVEL_CONT) {
                std::lock_guard<std::mutex> lock(mutex);
                if (errors.find(text) == std::string::npos) {
                    errors += text;
                }
            }
        }, nullptr);
        llama_backend_init();
        printf("seed %u\n", o.seed);
        result = test(o);
    } catch (const std::exception & e) {
        errors += std::string("error: ") + e.what() + "\n";
    }
    if (result != 0) {
        fputs(errors.substr(errors.size() - std::min<size_t>(errors.size(), 4000)).c_str(), stderr);
    }
    return result;
}

} // namespace replay
