#include "trace.h"

#include "json-writer.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace moe {

static constexpr size_t buffer_bytes = 256 * 1024;

std::string trace_header::json() const {
    std::string list;
    for (const trace_layer & l : layers) {
        list += (list.empty() ? "" : ",") + json_object().add("layer", l.layer).add("n_expert", l.n_expert).str();
    }
    return json_object()
        .raw("model", json_object().add("fingerprint", fingerprint).add("architecture", architecture).add("name", name).str())
        .add("n_expert_used", n_expert_used)
        .raw("layers", "[" + list + "]")
        .str();
}

static std::string prefix_and_header(const trace_header & header) {
    const std::string json = header.json();
    std::string out(trace_magic, 8);
    for (const uint32_t n : { trace_version, (uint32_t) json.size() }) {
        for (int i = 0; i < 4; ++i) {
            out += (char) (n >> (8 * i) & 0xff);
        }
    }
    return out + json;
}

// the first bytes of a file, fewer when it is shorter
static std::string read_beginning(int fd, size_t size) {
    std::string out(size, '\0');
    size_t n = 0;
    while (n < size) {
        const ssize_t got = pread(fd, &out[n], size - n, (off_t) n);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            break;
        }
        n += (size_t) got;
    }
    out.resize(n);
    return out;
}

trace_writer::trace_writer(int fd, const std::string & path, const trace_header & header, uint64_t limit)
    : fd(fd), path(path), layers(header.layers), limit(limit), buffer(buffer_bytes) {}

std::unique_ptr<trace_writer> trace_writer::open(const std::string & path, const trace_header & header, uint64_t limit, bool append, std::string & error) {
    const auto fail = [&](const std::string & what) {
        error = "cannot record a trace in '" + path + "': " + what;
        return nullptr;
    };
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) {
        return fail(std::string(strerror(errno)) + "; hint: check the path and its permissions");
    }
    std::unique_ptr<trace_writer> out(new trace_writer(fd, path, header, limit));

    struct stat st = {};
    const bool known   = fstat(fd, &st) == 0;
    const bool regular = known && S_ISREG(st.st_mode);
    if (known && (S_ISFIFO(st.st_mode) || S_ISSOCK(st.st_mode))) { // a graph would wait for whoever reads it
        return fail("it is a pipe; hint: give a file");
    }
    if (regular && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) { // file systems without locks have to do without
        return fail("another model records in it; hint: give each model a file of its own");
    }
    const std::string beginning = prefix_and_header(header);
    const std::string there     = regular ? read_beginning(fd, beginning.size()) : "";
    if (!there.empty() && there.compare(0, 8, trace_magic) != 0) {
        return fail("the file exists and holds no trace; hint: choose another name, or remove it");
    }
    if (append && !there.empty()) {
        if (there != beginning) {
            out->ended = true;
            return fail("it holds a trace of another model; hint: give each model a file of its own");
        }
        const off_t end = lseek(fd, 0, SEEK_END);
        out->n_written = end < 0 ? 0 : (uint64_t) end;
        out->n_whole   = out->n_written;
        return out;
    }
    if (regular && ftruncate(fd, 0) != 0) {
        return fail(std::string("emptying it failed: ") + strerror(errno) + "; hint: choose another name");
    }
    if (!out->write_all((const uint8_t *) beginning.data(), beginning.size())) {
        return fail(std::string("writing ") + std::to_string(beginning.size()) + " bytes failed: " + strerror(out->error_number)
            + "; hint: is the disk full?");
    }
    out->n_whole = out->n_written;
    return out;
}

trace_writer::~trace_writer() {
    flush();
    close(fd);
}

// False, and recording is over, when not everything could be written: the file then ends with the last record that was there before.
bool trace_writer::write_all(const uint8_t * data, uint64_t size) noexcept {
    while (size > 0) {
        const ssize_t n = write(fd, data, size);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            error_number = n < 0 ? errno : EIO;
            ended        = true;
            n_buffered   = 0;
            // what stays when this fails too is a record cut short, which readers know
            const int ignored = ftruncate(fd, (off_t) n_whole);
            (void) ignored;
            return false;
        }
        data      += n;
        size      -= (uint64_t) n;
        n_written += (uint64_t) n;
    }
    return true;
}

void trace_writer::write_buffer() noexcept {
    if (!ended && write_all(buffer.data(), n_buffered)) {
        n_buffered = 0;
    }
}

// between records only
void trace_writer::flush() noexcept {
    write_buffer();
    if (!ended) {
        n_whole = n_written;
    }
}

bool trace_writer::begin_record(int32_t i_layer, int64_t n_used, int64_t n_tokens, uint64_t id_bytes) noexcept {
    const uint64_t size = trace_record_bytes + (uint64_t) (n_used * n_tokens) * id_bytes;
    if (!ended && n_buffered + size > buffer.size()) {
        flush();
    }
    if (!ended && n_written + n_buffered + size > limit) {
        flush();
        ended = true;
    }
    if (ended) {
        return false;
    }
    put((uint32_t) i_layer, 2);
    put((uint32_t) n_used, 2);
    put((uint32_t) n_tokens, 4);
    return true;
}

void trace_writer::put(uint32_t value, uint64_t n_bytes) noexcept {
    if (n_buffered + n_bytes > buffer.size()) {
        write_buffer();
    }
    for (uint64_t i = 0; i < n_bytes && !ended; ++i) {
        buffer[n_buffered++] = (uint8_t) (value >> (8 * i));
    }
}

std::string trace_writer::take_notice() {
    if (!ended || noticed) {
        return "";
    }
    noticed = true;
    const std::string why = error_number == 0 ? "it has reached its limit of " + std::to_string(limit) + " bytes (--moe-trace-limit)" :
        std::string("writing failed: ") + strerror(error_number);
    return "recording the trace '" + path + "' has ended: " + why;
}

} // namespace moe
