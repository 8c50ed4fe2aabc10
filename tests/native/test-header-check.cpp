// check_headers() over headers written byte by byte. What it passes is for the reader to report: it must only never crash, wait or
// keep what it reads.

#include "check.h"
#include "header-check.h"

#include <filesystem>
#include <fstream>

#include <sys/stat.h>

using namespace moe;
namespace fs = std::filesystem;

namespace {

class folder {
public:
    folder() {
        std::string name = (fs::temp_directory_path() / "moe-test-header-XXXXXX").string();
        CHECK(mkdtemp(name.data()) != nullptr);
        path = name;
    }

    ~folder() { fs::remove_all(path); }

    std::string file(const std::string & name, const std::string & bytes, uint64_t size = 0) const {
        const fs::path p = path / name;
        std::ofstream(p, std::ios::binary) << bytes;
        if (size) {
            fs::resize_file(p, size); // a hole
        }
        return p.string();
    }

    fs::path path;
};

template <typename T> std::string raw(T n) { return std::string((const char *) &n, sizeof(n)); }

std::string text(const std::string & s) { return raw<uint64_t>(s.size()) + s; }

std::string header(uint64_t n_tensor, uint64_t n_kv, const std::string & kv) {
    return "GGUF" + raw<uint32_t>(3) + raw(n_tensor) + raw(n_kv) + kv;
}

std::string strings(const std::string & key, uint64_t n) {
    return text(key) + raw<uint32_t>(9) + raw<uint32_t>(8) + raw(n);
}

const uint64_t large = 1ull << 40;

} // namespace

TEST(good) {
    const folder f;
    const std::string kv = text("a") + raw<uint32_t>(4) + raw<uint32_t>(7) + strings("b", 2) + text("x") + text(std::string(5000, 'y')) +
        text("c") + raw<uint32_t>(9) + raw<uint32_t>(10) + raw<uint64_t>(3) + std::string(24, '\0') + text("d") + raw<uint32_t>(8) + text("z");
    CHECK_EQ(check_headers(f.file("m.gguf", header(5, 4, kv))), "");
    CHECK_EQ(check_headers(f.file("n.gguf", header(5, 4, kv) + "rest", large)), "");
}

TEST(what_the_reader_reports) {
    const folder f;
    CHECK_EQ(check_headers((f.path / "none.gguf").string()), "");
    CHECK_EQ(check_headers(""), "");
    CHECK_EQ(check_headers(f.file("empty.gguf", "")), "");
    CHECK_EQ(check_headers(f.file("magic.gguf", "GGUg" + std::string(64, '\0'))), "");
    CHECK_EQ(check_headers(f.file("version.gguf", "GGUF" + raw<uint32_t>(9) + std::string(64, '\xff'))), "");
    CHECK_EQ(check_headers(f.file("hole.gguf", header(0, 9, ""), large)), ""); // keys without a name
    const std::string good = header(1, 1, strings("b", 2) + text("x") + text("y"));
    for (size_t n = 0; n < good.size(); ++n) {
        CHECK_EQ(check_headers(f.file("cut.gguf", good.substr(0, n))), "");
    }
}

TEST(lengths) {
    const folder f;
    const auto said = [&](uint64_t n_tensor, uint64_t n_kv, const std::string & kv) {
        return check_headers(f.file("m.gguf", header(n_tensor, n_kv, kv), large));
    };
    CHECK_CONTAINS(said(1ull << 20, 0, ""), "absurd number of tensors: 1048576");
    CHECK_CONTAINS(said(0, ~0ull, ""), "absurd number of keys: 18446744073709551615");
    CHECK_CONTAINS(said(0, 1, raw<uint64_t>(1 << 20)), "absurd length of a key: 1048576");
    CHECK_CONTAINS(said(0, 1, strings("k", 1ull << 29)), "absurd length of the array 'k': 536870912");
    CHECK_CONTAINS(said(0, 1, strings("k", ~0ull)), "absurd length of the array 'k'");
    CHECK_CONTAINS(said(0, 2, strings("k", 1 << 20) + std::string(8 << 20, '\0') + strings("l", 1 << 21)), "absurd length of the array 'l'");
    CHECK_CONTAINS(said(0, 1, strings("k", 1) + raw<uint64_t>(1ull << 33)), "absurd length of a string in 'k': 8589934592");
    CHECK_CONTAINS(said(0, 1, text("k") + raw<uint32_t>(8) + raw<uint64_t>(1ull << 33)), "absurd length of a string in 'k'");
    CHECK_CONTAINS(said(0, 1, text("k") + raw<uint32_t>(9) + raw<uint32_t>(12) + raw<uint64_t>(1ull << 62)), "absurd length of the array 'k'");
    CHECK_CONTAINS(said(0, 1, text("k") + raw<uint32_t>(9) + raw<uint32_t>(12) + raw<uint64_t>(1ull << 28)), "absurd size of a header");
    CHECK_CONTAINS(said(0, 1, strings(std::string(500, 'k') + "\x1b[2J", ~0ull)), "'" + std::string(64, 'k') + "'");
    CHECK_CONTAINS(said(0, 1, strings("k\x1b" "l\xff", ~0ull)), "'k?l?'");
}

TEST(no_files) {
    const folder f;
    const fs::path pipe = f.path / "pipe.gguf";
    CHECK(mkfifo(pipe.c_str(), 0600) == 0);
    for (const std::string & path : { pipe.string(), f.path.string(), std::string("/dev/zero") }) {
        CHECK_CONTAINS(check_headers(path), "'" + path + "' is no regular file; hint: ");
    }
}

TEST(shards) {
    const folder f;
    const std::string first = f.file("m-00001-of-00003.gguf", header(0, 0, ""));
    CHECK_EQ(check_headers(first), ""); // the others are missing: the reader's to say
    f.file("m-00002-of-00003.gguf", header(0, 0, ""));
    f.file("m-00003-of-00003.gguf", header(1ull << 40, 0, ""));
    CHECK_CONTAINS(check_headers(first), "m-00003-of-00003.gguf': absurd number of tensors");
    CHECK_EQ(check_headers(f.path.string() + "/m-00002-of-00003.gguf"), "");
    CHECK_EQ(check_headers(f.file("n-00001-of-99999.gguf", header(0, 0, ""))), "");
}

TEST(random_bytes) {
    const folder f;
    const std::string good = header(5, 3, strings("b", 2) + text("x") + text(std::string(500, 'y')) + text("c") + raw<uint32_t>(9) +
        raw<uint32_t>(10) + raw<uint64_t>(3) + std::string(24, '\0') + text("d") + raw<uint32_t>(8) + text("z"));
    for (uint64_t seed = 0; seed < 3000; ++seed) {
        set_check_context("seed " + std::to_string(seed));
        test_random rnd(seed);
        std::string bytes = good;
        for (uint64_t n = rnd.between(1, 4); n > 0; --n) {
            bytes[rnd.below(bytes.size())] = (char) rnd.below(256);
        }
        const std::string said = check_headers(f.file("m.gguf", bytes, rnd.percent(50) ? large : 0));
        CHECK(said.empty() || said.find("absurd") != std::string::npos);
    }
}

int main(int argc, char ** argv) { return run_tests(argc, argv); }
