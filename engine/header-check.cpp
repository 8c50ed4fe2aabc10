#include "header-check.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>

#include <sys/stat.h>

namespace moe {

// real headers have some 20 MiB and 500,000 strings
static constexpr uint64_t max_header  = 1ull << 30; // bytes
static constexpr uint64_t max_string  = 1ull << 28; // bytes
static constexpr uint64_t max_strings = 1ull << 21; // in arrays, all together
static constexpr uint64_t max_count   = 1ull << 15; // keys, tensors

static constexpr uint32_t TYPE_STRING = 8;
static constexpr uint32_t TYPE_ARRAY  = 9;
static const uint64_t scalar_bytes[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };

namespace {

class walker {
public:
    walker(FILE * f, uint64_t size) : f(f), size(size) {}

    bool ended() const { return end; }

    // zero behind the end
    template <typename T> T number() {
        T n = 0;
        if (end || sizeof(T) > size - pos || fread(&n, sizeof(T), 1, f) != 1) {
            end = true;
            return 0;
        }
        pos += sizeof(T);
        return n;
    }

    std::string text(uint64_t n) {
        std::string s;
        if (end || n > size - pos) {
            end = true;
            return s;
        }
        s.resize(n);
        end = fread(&s[0], 1, n, f) != n;
        pos += n;
        return s;
    }

    void skip(uint64_t n) {
        if (end || n > size - pos) {
            end = true;
            return;
        }
        if (n < 4096) { // a seek would throw away what is buffered
            char buf[4096];
            end = fread(buf, 1, n, f) != n;
        } else {
            end = fseeko(f, (off_t) n, SEEK_CUR) != 0;
        }
        pos += n;
    }

    uint64_t at() const { return pos; }

private:
    FILE *   f;
    uint64_t size;
    uint64_t pos = 0;
    bool     end = false;
};

} // namespace

std::string printable(const std::string & name) {
    std::string out = name.substr(0, 64);
    for (char & c : out) {
        c = c >= ' ' && c <= '~' ? c : '?';
    }
    return out;
}

static std::string absurd(const char * what, const std::string & of, uint64_t n, uint64_t max) {
    return std::string("absurd ") + what + (of.empty() ? "" : " '" + printable(of) + "'") + ": " + std::to_string(n) + ", the most is " + std::to_string(max);
}

static std::string check_keys(walker & w) {
    char magic[4];
    for (char & c : magic) {
        c = w.number<char>();
    }
    const uint32_t version = w.number<uint32_t>();
    if (w.ended() || memcmp(magic, "GGUF", 4) != 0 || version < 2 || version > 3) {
        return "";
    }
    const uint64_t n_tensor = w.number<uint64_t>();
    const uint64_t n_kv     = w.number<uint64_t>();
    if (n_tensor > max_count) {
        return absurd("number of tensors", "", n_tensor, max_count);
    }
    if (n_kv > max_count) {
        return absurd("number of keys", "", n_kv, max_count);
    }
    uint64_t n_strings = 0;
    for (uint64_t i = 0; i < n_kv; ++i) {
        const uint64_t n_key = w.number<uint64_t>();
        if (n_key > 65535) {
            return absurd("length of a key", "", n_key, 65535);
        }
        const std::string key = w.text(n_key);
        uint32_t type  = w.number<uint32_t>();
        uint64_t count = 1;
        const bool is_array = type == TYPE_ARRAY;
        if (is_array) {
            type  = w.number<uint32_t>();
            count = w.number<uint64_t>();
        }
        if (w.ended() || key.empty() || type == TYPE_ARRAY || type >= sizeof(scalar_bytes) / sizeof(scalar_bytes[0])) {
            return "";
        }
        if (type == TYPE_STRING) {
            if (is_array && (count > max_strings || (n_strings += count) > max_strings)) {
                return absurd("length of the array", key, count, max_strings);
            }
            for (uint64_t j = 0; j < count && !w.ended(); ++j) {
                const uint64_t n = w.number<uint64_t>();
                if (n > max_string) {
                    return absurd("length of a string in", key, n, max_string);
                }
                w.skip(n);
            }
        } else if (count > max_header) {
            return absurd("length of the array", key, count, max_header);
        } else {
            w.skip(count * scalar_bytes[type]);
        }
        if (w.ended()) {
            return "";
        }
        if (w.at() > max_header) {
            return absurd("size of a header", "", w.at(), max_header);
        }
    }
    return "";
}

static std::string check_header(const std::string & path) {
    struct stat st;
    if (stat(path.c_str(), &st) != 0) {
        return "";
    }
    if (!S_ISREG(st.st_mode)) {
        return "'" + path + "' is no regular file; hint: give the path of a .gguf file";
    }
    const std::unique_ptr<FILE, int (*)(FILE *)> f(fopen(path.c_str(), "rb"), [](FILE * file) { return file ? fclose(file) : 0; });
    if (!f) {
        return "";
    }
    walker w(f.get(), (uint64_t) st.st_size);
    const std::string what = check_keys(w);
    return what.empty() ? "" : "'" + path + "': " + what + "; " + hint_damaged;
}

std::string check_headers(const std::string & path) {
    std::string what = check_header(path);
    static const size_t n_tail = strlen("-00001-of-00003.gguf");
    unsigned count = 0;
    if (path.size() <= n_tail || sscanf(path.c_str() + path.size() - n_tail, "-00001-of-%5u.gguf", &count) != 1) {
        return what;
    }
    for (unsigned i = 2; i <= count && what.empty(); ++i) {
        char tail[32];
        snprintf(tail, sizeof(tail), "-%05u-of-%05u.gguf", i, count);
        what = check_header(path.substr(0, path.size() - n_tail) + tail);
    }
    return what;
}

} // namespace moe
