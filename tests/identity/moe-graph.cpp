// Prints every node of the graphs that compute a prompt and one more token: the golden lists behind "off means off".
//
//   moe-graph -m model.gguf [--tokens 9,1] [--slots N] [--overlap on|off]
//
// One line a node: operation, type, shape, name, and the names of what it reads. Batches are computed one after the other in one
// sequence, on the CPU with plain kernels. Only llama.h is included and settings travel as the reserved keys, so that the same
// source compiles against an unpatched llama.cpp, which ignores them.

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"
#include "moe-gate.h"

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

// Bindings mirror these structs by hand: the patches may not add a field, and a new pin that does is to be noticed.
static_assert(sizeof(llama_model_params)   == 80,  "llama_model_params has changed");
static_assert(sizeof(llama_context_params) == 160, "llama_context_params has changed");

namespace {

struct options {
    std::string      model;
    std::vector<int> n_tokens = { 9, 1 };
    int64_t          slots    = 0; // 0: not streamed
    bool             overlap  = true;
};

options parse(int argc, char ** argv) {
    options o;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string arg   = argv[i];
        const std::string value = argv[i + 1];
        if      (arg == "-m")      { o.model = value; }
        else if (arg == "--slots") { o.slots = std::stoll(value); }
        else if (arg == "--overlap" && (value == "on" || value == "off")) { o.overlap = value == "on"; }
        else if (arg == "--tokens") {
            o.n_tokens.clear();
            for (size_t pos = 0; pos < value.size(); ) {
                size_t used = 0;
                o.n_tokens.push_back(std::stoi(value.substr(pos), &used));
                pos += used + 1;
            }
        }
        else { throw std::invalid_argument("bad argument '" + arg + " " + value + "'"); }
    }
    if (o.model.empty() || argc % 2 == 0) {
        throw std::invalid_argument("usage: moe-graph -m model.gguf [--tokens 9,1] [--slots N] [--overlap on|off]");
    }
    return o;
}

bool print_node(ggml_tensor * t, bool ask, void *) {
    if (!ask) {
        return true;
    }
    printf("%s %s [%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "] %s <-", ggml_op_desc(t), ggml_type_name(t->type),
            t->ne[0], t->ne[1], t->ne[2], t->ne[3], t->name);
    const char * separator = " ";
    for (const ggml_tensor * src : t->src) {
        if (src) {
            printf("%s%s", separator, src->name);
            separator = ", ";
        }
    }
    const moe_gate * gate;
    memcpy(&gate, &t->op_params[MOE_GATE_PARAM], sizeof(gate));
    printf("%s\n", t->op == GGML_OP_MUL_MAT_ID && gate ? ", gate" : "");
    return false; // its value is not wanted
}

void print_graphs(const options & o) {
    std::vector<llama_model_kv_override> overrides;
    if (o.slots != 0) {
        llama_model_kv_override slots = {};
        slots.tag     = LLAMA_KV_OVERRIDE_TYPE_INT;
        slots.val_i64 = o.slots;
        snprintf(slots.key, sizeof(slots.key), "moestream.slots");
        llama_model_kv_override overlap = {};
        overlap.tag      = LLAMA_KV_OVERRIDE_TYPE_BOOL;
        overlap.val_bool = o.overlap;
        snprintf(overlap.key, sizeof(overlap.key), "moestream.overlap");
        overrides = { slots, overlap, {} };
    }
    llama_model_params mparams = llama_model_default_params();
    mparams.n_gpu_layers    = 0;
    mparams.use_extra_bufts = false;
    mparams.kv_overrides    = overrides.empty() ? nullptr : overrides.data();
    const std::unique_ptr<llama_model, decltype(&llama_model_free)> model(
            llama_model_load_from_file(o.model.c_str(), mparams), llama_model_free);
    if (!model) {
        throw std::runtime_error("cannot load '" + o.model + "'");
    }

    llama_context_params cparams = llama_context_default_params();
    cparams.n_ctx           = 256;
    cparams.n_batch         = 64;
    cparams.n_ubatch        = 64;
    cparams.n_threads       = 1;
    cparams.n_threads_batch = 1;
    cparams.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED; // automatic would depend on the build
    cparams.cb_eval         = print_node;
    const std::unique_ptr<llama_context, decltype(&llama_free)> ctx(llama_init_from_model(model.get(), cparams), llama_free);
    if (!ctx) {
        throw std::runtime_error("cannot create a context");
    }

    llama_token next = 0;
    for (const int n : o.n_tokens) {
        printf("# %d tokens\n", n);
        std::vector<llama_token> tokens;
        for (int i = 0; i < n; ++i) {
            tokens.push_back(next++);
        }
        if (llama_decode(ctx.get(), llama_batch_get_one(tokens.data(), n)) != 0) {
            throw std::runtime_error("decode failed");
        }
    }
}

} // namespace

int main(int argc, char ** argv) {
    try {
        const options o = parse(argc, argv);
        llama_log_set([](ggml_log_level level, const char * text, void *) {
            if (level == GGML_LOG_LEVEL_ERROR) {
                fputs(text, stderr);
            }
        }, nullptr);
        llama_backend_init();
        print_graphs(o);
        return 0;
    } catch (const std::exception & e) {
        fprintf(stderr, "error: %s\n", e.what());
        return 2;
    }
}
