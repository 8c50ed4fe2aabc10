#pragma once

// What the patches call in llama.cpp's own files. Every hook is a no-op, and the graph upstream's, when the moe_stream pointer
// is null, which it is unless the model was loaded with the key moestream.slots (moe-api.h).
//
// Who calls what, in order:
//   llama_model_load                 moe_load_guard
//   llama_model_base::load_tensors   moe_load_begin, then per tensor moe_load_tensor, then moe_load_layout, moe_load_mapped,
//                                    moe_load_end
//   llama_init_from_model            moe_load_guard, moe_context_created
//   llm_graph_context                moe_graph_ids, moe_graph_weights
//   llama_model::build_graph         moe_graph_finish
//   llama_context::process_ubatch    moe_compute

#include "moe-api.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

struct llama_device;
struct llama_hparams;
struct llama_model;
struct llama_model_loader;
struct LLM_TN_IMPL;

struct moe_stream; // the engine of one model

// Around the loading of a model and the making of a context: a file whose header says something impossible is refused, where upstream
// would abort or crash. Off, like everything, for a model that does not stream.
class moe_load_guard {
public:
    // path: of the file, or of a split model's first; empty when it comes from elsewhere
    moe_load_guard(const llama_model_kv_override * overrides, const std::string & path);
    explicit moe_load_guard(const moe_stream * moe);
    ~moe_load_guard();
    moe_load_guard(const moe_load_guard &) = delete;
    moe_load_guard & operator=(const moe_load_guard &) = delete;

    // throws std::runtime_error naming key and value; before upstream looks at them
    void check(llama_model_loader & ml) const;

private:
    const bool on;
};

// Reads the settings, decides the number of slots, refuses what cannot work (throws std::runtime_error). Null: off.
// The caller keeps the result alive as long as the model, and stores the pointer in hparams.moe.
std::shared_ptr<moe_stream> moe_load_begin(
        llama_model_loader & ml, const llama_hparams & hparams, const llama_model_params & params,
        const std::vector<llama_device> & devices);

// A pool's buffer type when this tensor holds experts to be streamed: t_meta then has n_slot in place of n_expert rows of
// experts, and the loader's byte count is corrected. Else what upstream says, which also decides where the pool is: in a device's memory
// when it would put the experts there and we can, else in the processor's.
ggml_backend_buffer_type_t moe_load_tensor(
        moe_stream * moe, llama_model_loader & ml, const LLM_TN_IMPL & tn, int flags, ggml_tensor * t_meta,
        const std::function<ggml_backend_buffer_type_t(ggml_tensor *)> & upstream);

// after the last tensor was created, before buffers are: adds the staging tensors to the pools' contexts
void moe_load_layout(moe_stream * moe, llama_model_loader & ml);

// after the files were mapped: no mapping of expert bytes remains
void moe_load_mapped(moe_stream * moe, llama_model_loader & ml);

// a pool is filled by the engine, not by the loader
bool moe_is_pool(ggml_backend_buffer_type_t buft);

// buffers exist: connects slots, staging and files and starts the readers. prec: precision policy by weight, which staging
// twins of the weights must share.
void moe_load_end(moe_stream * moe, llama_model_loader & ml, std::unordered_map<const ggml_tensor *, ggml_prec> & prec);

// Prints what is in force and how much memory it takes. Throws std::runtime_error, and frees the context, when slots "auto" turn out
// to be too many for it.
void moe_context_created(const llama_model & model, llama_context * ctx);

// The ids for the expert matmuls of one MoE FFN, in place of the router's: slot ids, or the same ids behind the wait for the
// reads. Expands the start of the reads into gf. selected itself when down_exps is not streamed. state: what the FFN, and mostly its
// router, gets, [n_embd, n_tokens].
ggml_tensor * moe_graph_ids(moe_stream * moe, ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * selected, ggml_tensor * down_exps,
        ggml_tensor * state);

// the most nodes that the hooks add to a graph
uint32_t moe_graph_n_nodes(const moe_stream * moe);

// what mul_mat_id multiplies with for these ids: the pool, or the staging twin; w itself when it is not streamed
ggml_tensor * moe_graph_weights(moe_stream * moe, ggml_tensor * w, const ggml_tensor * ids);

// after the graph is built: moves the shared FFN between start and wait, marks where the next layer is read ahead
void moe_graph_finish(moe_stream * moe, ggml_cgraph * gf);

// around the computation of a graph: one at a time, and an error of a read becomes the graph's status. sched: what computes it, and may go
// on after it has returned
class moe_compute {
public:
    moe_compute(moe_stream * moe, ggml_backend_sched_t sched, uint32_t n_tokens);
    ~moe_compute();

    ggml_status finish(ggml_status status);

private:
    moe_stream * moe;
    ggml_backend_sched_t sched;
    bool         open = false;
};

// throws std::runtime_error naming the operation when the model streams
void moe_refuse(const moe_stream * moe, const char * what);
