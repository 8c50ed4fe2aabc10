#pragma once

// What tools and tests see of the streaming engine. Settings reach a model at load time as reserved keys among
// llama_model_params::kv_overrides (llama_model_params itself is mirrored by bindings and gets no field):
//
//   moestream.slots       int   slots per MoE layer; MOE_SLOTS_ALL, MOE_SLOTS_AUTO, MOE_SLOTS_MAP; absent or 0: streaming is off
//   moestream.io_threads  int   reads under way, 1..256 (default: 4, or what measures better at start)
//   moestream.io          str   "auto", "direct" or "buffered" (default auto)
//   moestream.io_backend  str   "auto", "threads" or "uring" (default auto)
//   moestream.policy      str   "lru", "lfu" or "heat" (default lru)
//   moestream.staging     str   "auto", "full" or "ring" (default auto)
//   moestream.overlap     bool  compute the shared FFN and with experts that are there while others are read (default true)
//   moestream.ram         int   bytes of the RAM tier, MOE_RAM_AUTO, 0: none; absent: none, or below slots on a device what is left, half of it at most
//   moestream.gpu_path    str   "auto", "copy" or "mailbox" (default auto)
//   moestream.pool        str   "auto", "device" or "host" (default auto)
//   moestream.require_gpu bool  refuse a model whose experts would not all be computed on devices (default false)
//   moestream.prefetch    str   "auto", "on" or "off" (default auto)
//   moestream.trace_limit int   MiB that the trace may have (default 1024)
//   moestream.files       int   from moe_add_files(): paths, for which an override has too little room
//   moestream.map_pin     int   experts a layer that never leave their slot, the most used of the router map (default 0)
//   moestream.warm        int   fill empty slots before anybody asks, and wait for that for so many seconds when the first context is made;
//                               absent or negative: do not
// What slots "auto" leaves room for:
//   moestream.n_ctx       int   the context; 0: the model's own
//   moestream.n_ubatch    int   tokens that are computed at once (default 512)
//   moestream.type_k, moestream.type_v   int   ggml_type of the KV cache (default F16)

#include "llama.h"

#include <string>
#include <vector>

#define MOE_SLOTS_AUTO (-1)
#define MOE_SLOTS_ALL  (-2)
#define MOE_SLOTS_MAP  (-3) // what the router map says of each layer
#define MOE_RAM_AUTO   (-1) // what memory is left beside everything else

// the flags of every tool; value is what follows the flag. Throws std::invalid_argument naming value and choices.
struct moe_flag {
    const char * name;  // "--moe-slots"
    const char * value; // "N|all|auto|map"
    const char * help;
    const char * env;   // "LLAMA_ARG_MOE_SLOTS"
    void (*apply)(std::vector<llama_model_kv_override> & overrides, const std::string & value);
};

#define MOE_MAX_FLAGS 32

const std::vector<moe_flag> & moe_flags(); // at most MOE_MAX_FLAGS

// llama-bench's own parser: true when argv[i] is one of the flags; then i has moved to the value and it was applied
bool moe_parse_flag(int argc, char ** argv, int & i, std::vector<llama_model_kv_override> & overrides);
std::string moe_flags_help(); // for the tools that print their own usage

// a log callback for tools that print nothing of the library's: errors (such as why --moe-slots was refused), and what is in force
void moe_log_errors(enum ggml_log_level level, const char * text, void * user_data);

// overrides terminated as upstream wants it, null when there are none; valid while overrides lives unchanged
const llama_model_kv_override * moe_overrides_data(std::vector<llama_model_kv_override> & overrides);

// Paths of files that the engine reads and writes for a model, null where there is none.
struct moe_files {
    size_t       size;  // sizeof(moe_files), as the caller knows it; fields behind it are taken as null, or left alone
    const char * trace; // which experts are chosen is recorded in it (docs/traces.md)
    const char * map;
};

// Keeps a copy and returns its number, the value of the key moestream.files in every load that these are for; the same number for the same
// paths. Never freed: a model may be loaded again at any time, from the same overrides.
extern "C" LLAMA_API int64_t moe_add_files(const struct moe_files * files);

// false: there is no such number
extern "C" LLAMA_API bool moe_get_files(int64_t number, struct moe_files * files);

// one of them, beside those that are set
void moe_set_file(std::vector<llama_model_kv_override> & overrides, const char * moe_files::* file, const std::string & path);

bool moe_is_on (const std::vector<llama_model_kv_override> & overrides);
void moe_clear (std::vector<llama_model_kv_override> & overrides); // drop ours, keep the user's
// tell slots "auto" of the context that will be made
void moe_set_context(std::vector<llama_model_kv_override> & overrides, int n_ctx, int n_ubatch, enum ggml_type type_k, enum ggml_type type_v);

// While one of these lives, graphs of the model compute with whatever the slots hold, and read, count and evict nothing: for runs whose
// results are thrown away. Does nothing for a model that does not stream.
class moe_dry_run {
public:
    LLAMA_API explicit moe_dry_run(const struct llama_model * model);
    LLAMA_API ~moe_dry_run();
    moe_dry_run(const moe_dry_run &) = delete;
    moe_dry_run & operator=(const moe_dry_run &) = delete;

private:
    const struct llama_model * model;
};

// Why the last graph of a model failed, for the answer to a client: "moestream: reading ... bytes at offset ... of 'model.gguf' failed
// ...", files without their folders. Empty when it did not fail, when that was asked before, or when the model does not stream.
LLAMA_API std::string moe_take_error(const struct llama_model * model);

// of the model loaded last that streams (a draft model never does); documents in docs/stats.md
LLAMA_API std::string moe_stats_json();
LLAMA_API std::string moe_stats_prometheus(); // empty when nothing streams

// of one model; null or a model that does not stream: streaming is false
LLAMA_API std::string moe_model_stats_json(const struct llama_model * model);

//
// for bindings of other languages, which have no std::string
//

// moe_model_stats_json() into out, at most size bytes with the terminating zero; returns the length of the whole without it, as snprintf does.
// 0: there was no memory for it.
extern "C" LLAMA_API size_t moe_stats_copy(const struct llama_model * model, char * out, size_t size);

// A log callback that hands on to the ggml_log_callback that user_data is, but for debug lines: upstream writes one for each expert that is
// repacked, from threads that should not wait for an interpreter's lock.
extern "C" LLAMA_API void moe_log_without_debug(enum ggml_log_level level, const char * text, void * user_data);
