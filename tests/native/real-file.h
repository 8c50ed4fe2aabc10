#pragma once

// Files on the disk for tests, and what the kernel says about them.

#include "check.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// A file in the working directory (/tmp is often a file system without direct reads), gone by name at once: whoever reads it
// afterwards goes through the descriptor.
class real_file {
public:
    explicit real_file(const std::string & text) {
        char path[] = "test-reader-XXXXXX";
        fd = mkstemp(path);
        CHECK(fd >= 0);
        CHECK(unlink(path) == 0);
        CHECK_EQ(write(fd, text.data(), text.size()), (ssize_t) text.size());
        CHECK(fsync(fd) == 0);
    }
    ~real_file() {
        if (fd >= 0) {
            close(fd);
        }
    }

    // written pages are in the cache: put them out
    void drop_cache() { CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0); }

    std::vector<bool> cached_pages() const {
        struct stat st;
        CHECK(fstat(fd, &st) == 0);
        const size_t page   = sysconf(_SC_PAGESIZE);
        const size_t n_page = (st.st_size + page - 1) / page;
        void * map = mmap(nullptr, st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        CHECK(map != MAP_FAILED);
        std::vector<unsigned char> resident(n_page);
        CHECK(mincore(map, st.st_size, resident.data()) == 0);
        munmap(map, st.st_size);
        std::vector<bool> out(n_page);
        for (size_t i = 0; i < n_page; ++i) {
            out[i] = resident[i] & 1;
        }
        return out;
    }

    int fd;
};

inline int32_t n_open_descriptors() {
    DIR * dir = opendir("/proc/self/fd");
    CHECK(dir != nullptr);
    int32_t n = 0;
    while (readdir(dir)) {
        n++;
    }
    closedir(dir);
    return n;
}

// Does this file system read directly at all? Asked without the code under test.
inline bool direct_reads_possible(const real_file & file) {
    const int fd = open(("/proc/self/fd/" + std::to_string(file.fd)).c_str(), O_RDONLY | O_DIRECT);
    if (fd < 0) {
        return false;
    }
    void * buf = nullptr;
    CHECK(posix_memalign(&buf, 4096, 4096) == 0);
    const bool works = pread(fd, buf, 4096, 0) > 0;
    free(buf);
    close(fd);
    return works;
}

inline void skip_without_direct_reads(const real_file & file) {
    if (!direct_reads_possible(file)) {
        skip_test("the file system of the working directory refuses O_DIRECT");
    }
}
