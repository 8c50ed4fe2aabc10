#pragma once

// What the engine says in JSON: statistics, the header of a trace, replays.

#include <cstdint>
#include <cstdio>
#include <string>

namespace moe {

// the length of the UTF-8 sequence at s[i] (Unicode 15, table 3-7); 0 when there is none
inline size_t utf8_length(const std::string & s, size_t i) {
    const auto at = [&](size_t k) { return k < s.size() ? (unsigned char) s[k] : 0u; };
    const unsigned c = at(i);
    const size_t   n = c < 0x80 ? 1 : c >= 0xc2 && c <= 0xdf ? 2 : c >= 0xe0 && c <= 0xef ? 3 : c >= 0xf0 && c <= 0xf4 ? 4 : 0;
    for (size_t k = 1; k < n; ++k) {
        // after some first bytes the second is confined: no overlong forms, surrogates, or code points past the last
        const unsigned lo = k > 1 ? 0x80 : c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
        const unsigned hi = k > 1 ? 0xbf : c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
        if (at(i + k) < lo || at(i + k) > hi) {
            return 0;
        }
    }
    return n;
}

// a small JSON writer: keys in order, commas where they belong
class json_object {
public:
    json_object & add(const char * key, const std::string & value) { return raw(key, quoted(value)); }
    json_object & add(const char * key, const char * value) { return raw(key, quoted(value)); }
    json_object & add(const char * key, bool value) { return raw(key, value ? "true" : "false"); }
    json_object & add(const char * key, int32_t value) { return raw(key, std::to_string(value)); }
    json_object & add(const char * key, uint64_t value) { return raw(key, std::to_string(value)); }

    json_object & raw(const char * key, const std::string & value) {
        body += (body.empty() ? "" : ",") + quoted(key) + ":" + value;
        return *this;
    }

    std::string str() const { return "{" + body + "}"; }

private:
    static std::string quoted(const std::string & s) {
        std::string out = "\"";
        for (size_t i = 0; i < s.size(); ) {
            const char   c = s[i];
            const size_t n = utf8_length(s, i);
            if (c == '"' || c == '\\') {
                out += '\\';
                out += c;
            } else if ((unsigned char) c < 0x20) {
                char buf[8];
                snprintf(buf, sizeof(buf), "\\u%04x", c);
                out += buf;
            } else if (n == 0) {
                out += "\xef\xbf\xbd"; // U+FFFD: a file name may hold any bytes, a document of JSON may not
            } else {
                out.append(s, i, n);
            }
            i += n == 0 ? 1 : n;
        }
        return out + "\"";
    }

    std::string body;
};

} // namespace moe
