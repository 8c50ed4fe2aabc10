// What a program of one's own may not do with a streamed model: each attempt must throw and leave the model usable.
//
//   moe-refuse MODEL SLOTS FILE
//
// Prints a line for each attempt: its name, and what was thrown, or "allowed". FILE is where the model would be saved.

#include "ggml-opt.h"
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <vector>

static void attempt(const char * name, const std::function<void()> & what) {
    try {
        what();
        printf("%s: allowed\n", name);
    } catch (const std::exception & e) {
        printf("%s: %s\n", name, e.what());
    }
    fflush(stdout);
}

static llama_model_kv_override setting(const char * key) {
    llama_model_kv_override o = {};
    snprintf(o.key, sizeof(o.key), "%s", key);
    return o;
}

static llama_model * load(const char * path, const llama_model_kv_override & a, const llama_model_kv_override & b = {}) {
    const llama_model_kv_override overrides[] = { a, b, {} };
    llama_model_params params = llama_model_default_params();
    params.kv_overrides = overrides;
    return llama_model_load_from_file(path, params);
}

static void log_errors(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

int main(int argc, char ** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: moe-refuse MODEL SLOTS FILE\n");
        return 2;
    }
    llama_log_set(log_errors, nullptr);
    llama_backend_init();

    llama_model_kv_override slots = setting("moestream.slots");
    slots.tag     = LLAMA_KV_OVERRIDE_TYPE_INT;
    slots.val_i64 = atoll(argv[2]);

    // settings that no flag can produce; why is in the log
    llama_model_kv_override as_text = setting("moestream.slots");
    as_text.tag = LLAMA_KV_OVERRIDE_TYPE_STR;
    snprintf(as_text.val_str, sizeof(as_text.val_str), "8");
    printf("slots as text: %s\n", load(argv[1], as_text) ? "loaded" : "refused");
    llama_model_kv_override negative = slots;
    negative.val_i64 = -7;
    printf("slots -7: %s\n", load(argv[1], negative) ? "loaded" : "refused");
    llama_model_kv_override threads = setting("moestream.io_threads");
    threads.tag     = LLAMA_KV_OVERRIDE_TYPE_INT;
    threads.val_i64 = 1 << 30;
    printf("2^30 threads: %s\n", load(argv[1], slots, threads) ? "loaded" : "refused");
    llama_model_kv_override files = setting("moestream.files");
    files.tag     = LLAMA_KV_OVERRIDE_TYPE_INT;
    files.val_i64 = 3;
    printf("files that nobody added: %s\n", load(argv[1], slots, files) ? "loaded" : "refused");
    printf("threads without slots: %s\n", load(argv[1], threads) ? "loaded" : "refused");

    llama_model * model = load(argv[1], slots);
    if (!model) {
        return 1;
    }
    llama_context_params cparams = llama_context_default_params();
    cparams.n_ctx           = 64;
    cparams.n_threads       = 1;
    cparams.n_threads_batch = 1;
    llama_context * ctx = llama_init_from_model(model, cparams);
    if (!ctx) {
        return 1;
    }

    attempt("save", [&] { llama_model_save_to_file(model, argv[3]); });
    attempt("train", [&] {
        llama_opt_params opt = {};
        opt.param_filter   = llama_opt_param_filter_all;
        opt.get_opt_pars   = ggml_opt_get_default_optimizer_params;
        opt.optimizer_type = GGML_OPT_OPTIMIZER_TYPE_SGD;
        llama_opt_init(ctx, model, opt);
    });

    std::vector<llama_token> tokens = { 5, 6, 7 };
    printf("decode: %d\n", llama_decode(ctx, llama_batch_get_one(tokens.data(), (int32_t) tokens.size())));
    llama_free(ctx);
    llama_model_free(model);
    llama_backend_free();
    return 0;
}
