#pragma once

// Reads through io_uring, with the kernel's own interface: two rings shared with it, three system calls. There is no library to find, and
// nothing is compiled where the kernel's header is missing.

#include "reader.h"

namespace moe {

// whether this kernel lets this process read through io_uring; why not in error
bool uring_works(std::string & error);

// A queue of up to depth reads of these files, which stay open as long as it lives. Null: there is none, and error says why.
std::unique_ptr<read_queue> make_uring(const std::vector<int> & fds, int32_t depth, std::string & error);

} // namespace moe
