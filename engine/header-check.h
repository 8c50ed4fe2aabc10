#pragma once

#include <string>

namespace moe {

constexpr const char * hint_damaged = "hint: the file is damaged, or made for another version; download or convert it again";

// Walks the keys of a GGUF header without keeping anything, and says what is wrong with it that its reader does not look at before it
// waits or allocates: no regular file (opening a pipe waits for ever), and lengths that no header has (in a file as large as a model
// they pass as possible). Of a split model's first file all shards are looked at. Empty: nothing, or what the reader reports by itself.
std::string check_headers(const std::string & path);

// a name from a file, short and without what a terminal obeys
std::string printable(const std::string & name);

} // namespace moe
