#include "moe-api.h"

#include "log.h"
#include "policy.h"
#include "reader.h"

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

static llama_model_kv_override * find(std::vector<llama_model_kv_override> & overrides, const char * key) {
    for (auto & o : overrides) {
        if (strcmp(o.key, key) == 0) {
            return &o;
        }
    }
    return nullptr;
}

// Upstream's log is written by a thread, and what it has not written when the program returns is lost: a refusal must not be.
static void flush_log_at_exit() {
    static const int registered = std::atexit([] { common_log_flush(common_log_main()); });
    (void) registered;
}

// the entry of this key, new or already there; a terminating empty entry stays last
static llama_model_kv_override & entry(std::vector<llama_model_kv_override> & overrides, const char * key) {
    flush_log_at_exit();
    if (auto * o = find(overrides, key)) {
        return *o;
    }
    llama_model_kv_override o = {};
    snprintf(o.key, sizeof(o.key), "%s", key);
    const bool terminated = !overrides.empty() && overrides.back().key[0] == 0;
    return *overrides.insert(terminated ? overrides.end() - 1 : overrides.end(), o);
}

static void set_int(std::vector<llama_model_kv_override> & overrides, const char * key, int64_t value) {
    auto & o = entry(overrides, key);
    o.tag     = LLAMA_KV_OVERRIDE_TYPE_INT;
    o.val_i64 = value;
}

static void set_str(std::vector<llama_model_kv_override> & overrides, const char * key, const std::string & value) {
    auto & o = entry(overrides, key);
    o.tag = LLAMA_KV_OVERRIDE_TYPE_STR;
    snprintf(o.val_str, sizeof(o.val_str), "%s", value.c_str());
}

static void set_bool(std::vector<llama_model_kv_override> & overrides, const char * key, bool value) {
    auto & o = entry(overrides, key);
    o.tag      = LLAMA_KV_OVERRIDE_TYPE_BOOL;
    o.val_bool = value;
}

void moe_set_file(std::vector<llama_model_kv_override> & overrides, const char * moe_files::* file, const std::string & path) {
    moe_files files = { sizeof(files), nullptr, nullptr };
    if (const auto * o = find(overrides, "moestream.files")) {
        moe_get_files(o->val_i64, &files);
    }
    files.*file = path.c_str();
    set_int(overrides, "moestream.files", moe_add_files(&files));
}

[[noreturn]] static void refuse(const char * flag, const std::string & value, const char * wanted) {
    throw std::invalid_argument(std::string(flag) + " '" + value + "': expected " + wanted);
}

static int64_t parse_int(const char * flag, const std::string & value, int64_t min, int64_t max, const char * wanted) {
    size_t  used = 0;
    int64_t n    = 0;
    try {
        n = std::stoll(value, &used);
    } catch (const std::exception &) {
        refuse(flag, value, wanted);
    }
    if (used != value.size() || n < min || n > max) {
        refuse(flag, value, wanted);
    }
    return n;
}

// bytes; as moestream/sizes.py reads them
static int64_t parse_size(const char * flag, const std::string & value) {
    static const char * const wanted = "a size ('4GiB', say), 'auto' or 'none'";
    static const std::pair<const char *, double> units[] = {
        { "", 1 }, { "b", 1 },
        { "kib", 1024.0 }, { "mib", 1048576.0 }, { "gib", 1073741824.0 }, { "tib", 1099511627776.0 },
        { "kb", 1e3 }, { "mb", 1e6 }, { "gb", 1e9 }, { "tb", 1e12 },
    };
    size_t used = 0;
    double n    = 0;
    try {
        n = std::stod(value, &used);
    } catch (const std::exception &) {
        refuse(flag, value, wanted);
    }
    const bool digits = value[0] != '.' && value.find_first_not_of("0123456789.") >= used; // no sign, no exponent, no infinity
    std::string unit = value.substr(used + (used < value.size() && value[used] == ' '));
    for (char & c : unit) {
        c = (char) std::tolower((unsigned char) c);
    }
    for (const auto & [name, bytes] : units) {
        if (digits && unit == name && n * bytes >= 1 && n * bytes < 9e18) {
            return (int64_t) (n * bytes);
        }
    }
    refuse(flag, value, wanted);
}

const std::vector<moe_flag> & moe_flags() {
    static const std::vector<moe_flag> flags = {
        {
            "--moe-slots", "N|all|auto|map",
            "stream the experts of a mixture-of-experts model from its file: each MoE layer keeps N expert slots in memory\n"
            "(at least as many as experts are used per token; 'all': one for every expert; 'auto': what fits into memory;\n"
            "'map': as many in each layer as the router map says)",
            "LLAMA_ARG_MOE_SLOTS",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                int64_t n;
                if (value == "all") {
                    n = MOE_SLOTS_ALL;
                } else if (value == "auto") {
                    n = MOE_SLOTS_AUTO;
                } else if (value == "map") {
                    n = MOE_SLOTS_MAP;
                } else {
                    n = parse_int("--moe-slots", value, 1, 1000000, "a number of slots from 1, 'all', 'auto' or 'map'");
                }
                set_int(overrides, "moestream.slots", n);
            },
        },
        {
            "--moe-io-threads", "N",
            "reads of experts at a time, by as many threads or by io_uring (default: 4, or what measures better at start)",
            "LLAMA_ARG_MOE_IO_THREADS",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                set_int(overrides, "moestream.io_threads",
                        parse_int("--moe-io-threads", value, 1, 256, "a number from 1 to 256"));
            },
        },
        {
            "--moe-io", "auto|direct|buffered",
            "how experts are read: past the page cache, through it, or the former when the experts exceed free memory and the drive, measured\n"
            "at start, is not much slower that way (default: auto)",
            "LLAMA_ARG_MOE_IO",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                moe::io_mode mode;
                if (!moe::io_mode_from_name(value, mode)) {
                    refuse("--moe-io", value, "'auto', 'direct' or 'buffered'");
                }
                set_str(overrides, "moestream.io", value);
            },
        },
        {
            "--moe-io-backend", "auto|threads|uring",
            "what keeps reads under way: threads that sleep, or io_uring; auto: threads, unless io_uring measures better at start (default: auto)",
            "LLAMA_ARG_MOE_IO_BACKEND",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                moe::io_backend backend;
                if (!moe::io_backend_from_name(value, backend)) {
                    refuse("--moe-io-backend", value, "'auto', 'threads' or 'uring'");
                }
                set_str(overrides, "moestream.io_backend", value);
            },
        },
        {
            "--moe-policy", "lru|lfu|heat",
            "which expert loses its slot: the least recently used, the least frequently used, or that of least recent frequency (default: lru)",
            "LLAMA_ARG_MOE_POLICY",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                moe::policy_kind kind;
                if (!moe::policy_from_name(value, kind)) {
                    refuse("--moe-policy", value, "'lru', 'lfu' or 'heat'");
                }
                set_str(overrides, "moestream.policy", value);
            },
        },
        {
            "--moe-staging", "auto|full|ring",
            "how batches are computed that the slots cannot hold: through a buffer as wide as two layers, or, with less memory,\n"
            "through a small one that each expert passes through (default: auto, the latter when memory is short)",
            "LLAMA_ARG_MOE_STAGING",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                if (value != "auto" && value != "full" && value != "ring") {
                    refuse("--moe-staging", value, "'auto', 'full' or 'ring'");
                }
                set_str(overrides, "moestream.staging", value);
            },
        },
        {
            "--moe-ram", "SIZE|auto|none",
            "memory below the slots, for experts of all layers that lost their slot: 4GiB, say; auto: what is left (default: none).\n"
            "For slots on a device: page-locked, for any experts (default: up to half of what is left)",
            "LLAMA_ARG_MOE_RAM",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                set_int(overrides, "moestream.ram", value == "auto" ? MOE_RAM_AUTO : value == "none" ? 0 : parse_size("--moe-ram", value));
            },
        },
        {
            "--moe-prefetch", "auto|on|off",
            "read experts ahead that the next layer will probably choose, by its router, while nothing else is to be read; auto: when graphs turn\n"
            "out to be faster with it (default: auto)",
            "LLAMA_ARG_MOE_PREFETCH",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                if (value != "auto" && value != "on" && value != "off") {
                    refuse("--moe-prefetch", value, "'auto', 'on' or 'off'");
                }
                set_str(overrides, "moestream.prefetch", value);
            },
        },
        {
            "--moe-gpu-path", "auto|copy|mailbox",
            "who looks after slots on a device: the device itself, which asks for nothing but experts that are only on disk (mailbox), or\n"
            "the host between the parts of each graph (copy) (default: auto, the former where it can be)",
            "LLAMA_ARG_MOE_GPU_PATH",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                if (value != "auto" && value != "copy" && value != "mailbox") {
                    refuse("--moe-gpu-path", value, "'auto', 'copy' or 'mailbox'");
                }
                set_str(overrides, "moestream.gpu_path", value);
            },
        },
        {
            "--moe-pool", "auto|device|host",
            "where the slots of layers are that a device computes: in its memory, or in page-locked memory of the host that it reads in\n"
            "place, for devices that share memory with the host (default: auto, the former)",
            "LLAMA_ARG_MOE_POOL",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                if (value != "auto" && value != "device" && value != "host") {
                    refuse("--moe-pool", value, "'auto', 'device' or 'host'");
                }
                set_str(overrides, "moestream.pool", value);
            },
        },
        {
            "--moe-require-gpu", "on|off",
            "refuse to load a model if any layer's experts would be computed on the cpu (default: off)",
            "LLAMA_ARG_MOE_REQUIRE_GPU",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                if (value != "on" && value != "off") {
                    refuse("--moe-require-gpu", value, "'on' or 'off'");
                }
                set_bool(overrides, "moestream.require_gpu", value == "on");
            },
        },
        {
            "--moe-overlap", "on|off",
            "compute the shared or dense FFN of a layer, and with the experts that are there, while others are read (default: on)",
            "LLAMA_ARG_MOE_OVERLAP",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                if (value != "on" && value != "off") {
                    refuse("--moe-overlap", value, "'on' or 'off'");
                }
                set_bool(overrides, "moestream.overlap", value == "on");
            },
        },
        {
            "--moe-trace", "FILE",
            "record which experts are chosen in this file, for moestream trace and map (default: off)",
            "LLAMA_ARG_MOE_TRACE",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                if (value.empty()) {
                    refuse("--moe-trace", value, "the name of a file");
                }
                moe_set_file(overrides, &moe_files::trace, value);
            },
        },
        {
            "--moe-trace-limit", "MIB",
            "recording ends before the file has more than this many MiB (default: 1024)",
            "LLAMA_ARG_MOE_TRACE_LIMIT",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                set_int(overrides, "moestream.trace_limit",
                        parse_int("--moe-trace-limit", value, 1, 1 << 30, "a number of MiB from 1"));
            },
        },
        {
            "--moe-map", "FILE",
            "the model's router map: which experts are used most; for --moe-map-pin, --moe-warm and --moe-slots map",
            "LLAMA_ARG_MOE_MAP",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                if (value.empty()) {
                    refuse("--moe-map", value, "the path of a router map");
                }
                moe_set_file(overrides, &moe_files::map, value);
            },
        },
        {
            "--moe-map-pin", "N",
            "experts of each MoE layer that never leave their slot: the N most used of the router map (default: 0)",
            "LLAMA_ARG_MOE_MAP_PIN",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                set_int(overrides, "moestream.map_pin", parse_int("--moe-map-pin", value, 0, 1000000, "a number of experts"));
            },
        },
        {
            "--moe-warm", "SECONDS|off",
            "fill empty slots before anybody asks, the most used experts of the router map first, while nothing is computed;\n"
            "loading waits for that for SECONDS at most (0: not at all) (default: off)",
            "LLAMA_ARG_MOE_WARM",
            [](std::vector<llama_model_kv_override> & overrides, const std::string & value) {
                set_int(overrides, "moestream.warm",
                        value == "off" ? -1 : parse_int("--moe-warm", value, 0, 86400, "a number of seconds up to 86400, or 'off'"));
            },
        },
    };
    return flags;
}

bool moe_parse_flag(int argc, char ** argv, int & i, std::vector<llama_model_kv_override> & overrides) {
    for (const moe_flag & flag : moe_flags()) {
        if (strcmp(argv[i], flag.name) == 0) {
            if (i + 1 >= argc) {
                throw std::invalid_argument(std::string(flag.name) + " needs a value: " + flag.value);
            }
            flag.apply(overrides, argv[++i]);
            return true;
        }
    }
    return false;
}

std::string moe_flags_help() {
    std::string out;
    for (const moe_flag & flag : moe_flags()) {
        char line[256];
        const std::string name = std::string(flag.name) + " <" + flag.value + ">";
        const std::string help = std::string(flag.help).substr(0, std::string(flag.help).find('\n'));
        snprintf(line, sizeof(line), "  %-41s %s\n", name.c_str(), help.c_str());
        out += line;
    }
    return out;
}

void moe_log_errors(enum ggml_log_level level, const char * text, void * /*user_data*/) {
    if (level == GGML_LOG_LEVEL_ERROR || strncmp(text, "moestream: ", 11) == 0) {
        fputs(text, stderr);
    }
}

const llama_model_kv_override * moe_overrides_data(std::vector<llama_model_kv_override> & overrides) {
    if (overrides.empty()) {
        return nullptr;
    }
    if (overrides.back().key[0] != 0) {
        overrides.emplace_back();
        overrides.back().key[0] = 0;
    }
    return overrides.data();
}

bool moe_is_on(const std::vector<llama_model_kv_override> & overrides) {
    for (const auto & o : overrides) {
        if (strcmp(o.key, "moestream.slots") == 0) {
            return o.val_i64 != 0;
        }
    }
    return false;
}

void moe_clear(std::vector<llama_model_kv_override> & overrides) {
    std::vector<llama_model_kv_override> kept;
    for (const auto & o : overrides) {
        if (strncmp(o.key, "moestream.", 10) != 0) {
            kept.push_back(o);
        }
    }
    if (kept.size() == 1 && kept[0].key[0] == 0) {
        kept.clear(); // upstream wants no list rather than an empty one
    }
    overrides = kept;
}

void moe_set_context(std::vector<llama_model_kv_override> & overrides, int n_ctx, int n_ubatch, enum ggml_type type_k, enum ggml_type type_v) {
    if (moe_is_on(overrides)) {
        set_int(overrides, "moestream.n_ctx",    n_ctx);
        set_int(overrides, "moestream.n_ubatch", n_ubatch);
        set_int(overrides, "moestream.type_k",   type_k);
        set_int(overrides, "moestream.type_v",   type_v);
    }
}
