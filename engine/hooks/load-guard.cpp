// Files that are damaged, or made to harm: refused with what is wrong, where upstream would abort or crash.

#include "model.h"

#include "header-check.h"

#include "llama-arch.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace moe::hooks {

// Upstream checks much of a header by assertions, which abort. While a guard lives in a thread, one that fails there is an error of the
// file: a message, and exit code 1. Not an exception: those cannot cross ggml's C code.
static thread_local int        guards = 0; // of this thread
static std::mutex              guard_mutex;
static int                     guards_all = 0;
static ggml_abort_callback_t   callback_before = nullptr;

static void on_abort(const char * message) {
    if (guards > 0) {
        const bool is_memory = strstr(message, "mem_buffer") || strstr(message, "alloc");
        fprintf(stderr, "moestream: cannot load the model: llama.cpp ends with '%s'; hint: %s\n", message, is_memory ?
                "memory has run out; fewer slots, a smaller context (-c), or a larger limit" :
                "is a setting impossible for this model (--override-kv)? else the file is damaged, or made for another version");
        fflush(stderr);
        std::_Exit(1);
    }
    if (callback_before) {
        callback_before(message);
    } else {
        fprintf(stderr, "%s\n", message);
    }
}

static bool asks_for_slots(const llama_model_kv_override * overrides) {
    for (const auto * o = overrides; o && o->key[0]; ++o) {
        if (strcmp(o->key, "moestream.slots") == 0 && o->tag == LLAMA_KV_OVERRIDE_TYPE_INT) {
            return o->val_i64 != 0;
        }
    }
    return false;
}

bool guard_begin(bool on) {
    if (on) {
        std::lock_guard<std::mutex> lock(guard_mutex);
        if (guards_all++ == 0) {
            callback_before = ggml_set_abort_callback(on_abort);
        }
        ++guards;
    }
    return on;
}

void guard_end(bool on) {
    if (on) {
        std::lock_guard<std::mutex> lock(guard_mutex);
        --guards;
        if (--guards_all == 0) {
            ggml_set_abort_callback(callback_before);
        }
    }
}

[[noreturn]] static void refuse_file(const std::string & what) {
    throw std::runtime_error(what + "; " + moe::hint_damaged);
}

void check_model(const moe_stream & moe, const llama_hparams & hparams) {
    if (hparams.n_ctx_train == 0) { // llama-server would end by an assertion at the first request
        refuse_file("context_length is 0: expected 1 or more");
    }
    for (const float eps : { hparams.f_norm_eps, hparams.f_norm_rms_eps, hparams.f_norm_group_eps }) {
        if (!(eps >= 0.0f)) {
            refuse_file(format("the epsilon of a norm is %g: expected a number that is not negative", eps));
        }
    }
    for (const uint32_t n_rot : { hparams.n_rot_full, hparams.n_rot_swa }) {
        const bool sections = hparams.rope_type == LLAMA_ROPE_TYPE_MROPE || hparams.rope_type == LLAMA_ROPE_TYPE_IMROPE;
        if (hparams.rope_type != LLAMA_ROPE_TYPE_NONE && (n_rot % 2 != 0 || (n_rot == 0 && sections))) {
            refuse_file(format("rope.dimension_count is %u: expected an even number%s", n_rot, sections ? " from 2" : ""));
        }
    }
    for (const auto & [il, tensors] : moe.layers) {
        if (hparams.n_expert_used(il) == 0) {
            refuse_file(format("layer %d has experts ('%s') and uses none: its expert_used_count is 0", il, tensors[0].name.c_str()));
        }
    }
}

void check_type(const LLM_TN_IMPL & tn, const ggml_tensor * t) {
    const bool is_bias = tn.suffix && strcmp(tn.suffix, "bias") == 0;
    const bool is_dense_float = t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_F16 || t->type == GGML_TYPE_BF16;
    bool ok = true;
    switch (is_bias ? GGML_OP_ADD : tn.tensor == LLM_TENSOR_TOKEN_EMBD ? GGML_OP_MUL_MAT : llm_tensor_info_for(tn.tensor).op) {
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID:
            ok = is_dense_float || (ggml_is_quantized(t->type) && ggml_get_type_traits(t->type)->to_float);
            break;
        case GGML_OP_ADD:
        case GGML_OP_MUL:
        case GGML_OP_DIV:
            ok = is_dense_float;
            break;
        default:
            break;
    }
    if (!ok) {
        refuse_file(format("tensor '%s' has type %s, which is no type of weights", tn.str().c_str(), ggml_type_name(t->type)));
    }
}

} // namespace moe::hooks

using namespace moe::hooks;

moe_load_guard::moe_load_guard(const moe_stream * moe) : on(guard_begin(moe != nullptr)) {}

moe_load_guard::moe_load_guard(const llama_model_kv_override * overrides, const std::string & path) : on([&] {
    if (!asks_for_slots(overrides)) {
        return false;
    }
    const std::string what = moe::check_headers(path);
    if (!what.empty()) {
        throw std::runtime_error(what);
    }
    return guard_begin(true);
}()) {}

moe_load_guard::~moe_load_guard() {
    guard_end(on);
}

// The counts that upstream asserts, in its order. A key that is missing or of a wrong type has a message of upstream's.
void moe_load_guard::check(llama_model_loader & ml) const {
    const llm_arch arch = ml.get_arch();
    if (!on || arch == LLM_ARCH_UNKNOWN || arch == LLM_ARCH_HUNYUAN_VL || arch == LLM_ARCH_HUNYUAN_DENSE) { // dense, whatever they say
        return;
    }
    const auto number = [&](llm_kv kid) {
        uint32_t n = 0;
        ml.get_key(kid, n, false);
        return n;
    };
    const auto expect = [&](bool ok, llm_kv kid, uint32_t n, const std::string & expected) {
        if (!ok) {
            refuse_file(format("%s is %u: expected %s", ml.llm_kv(kid).c_str(), n, expected.c_str()));
        }
    };

    const uint32_t n_layer = number(LLM_KV_BLOCK_COUNT);
    const uint32_t n_mtp   = number(LLM_KV_NEXTN_PREDICT_LAYERS);
    if (gguf_find_key(ml.metadata, ml.llm_kv(LLM_KV_BLOCK_COUNT).c_str()) >= 0) {
        expect(n_layer >= 1 && n_layer <= LLAMA_MAX_LAYERS, LLM_KV_BLOCK_COUNT, n_layer, format("1 to %d", LLAMA_MAX_LAYERS));
        expect(n_mtp <= n_layer, LLM_KV_NEXTN_PREDICT_LAYERS, n_mtp, format("no more than the %u of block_count", n_layer));
    }

    const uint32_t n_expert = number(LLM_KV_EXPERT_COUNT);
    expect(n_expert <= LLAMA_MAX_EXPERTS, LLM_KV_EXPERT_COUNT, n_expert, format("at most %d", LLAMA_MAX_EXPERTS));

    std::vector<uint32_t> used; // of each layer, where the file says so
    const int kid_used = gguf_find_key(ml.metadata, ml.llm_kv(LLM_KV_EXPERT_USED_COUNT).c_str());
    if (kid_used < 0 || gguf_get_kv_type(ml.metadata, kid_used) != GGUF_TYPE_ARRAY) {
        used.push_back(number(LLM_KV_EXPERT_USED_COUNT));
    } else {
        ml.get_arr(LLM_KV_EXPERT_USED_COUNT, used);
    }
    const uint32_t n_used = used.empty() ? 0 : *std::max_element(used.begin(), used.end());
    expect(n_used <= n_expert, LLM_KV_EXPERT_USED_COUNT, n_used, format("no more than the %u of expert_count", n_expert));
    expect(n_used > 0 || n_expert == 0, LLM_KV_EXPERT_USED_COUNT, n_used, format("1 to %u", n_expert));

    const uint32_t n_group      = number(LLM_KV_EXPERT_GROUP_COUNT);
    const uint32_t n_group_used = number(LLM_KV_EXPERT_GROUP_USED_COUNT);
    expect(n_group == 0 || n_group < n_expert, LLM_KV_EXPERT_GROUP_COUNT, n_group, format("less than the %u of expert_count", n_expert));
    if (n_group > 1) {
        expect(n_expert % n_group == 0, LLM_KV_EXPERT_GROUP_COUNT, n_group, format("a divisor of the %u of expert_count", n_expert));
        expect(n_group_used > 0 && n_group_used < n_group, LLM_KV_EXPERT_GROUP_USED_COUNT, n_group_used,
                format("1 to %u, with %u groups", n_group - 1, n_group));
    }
}
