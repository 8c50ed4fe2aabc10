// Makes RPC known to the program that this library is preloaded into (LD_PRELOAD), as a build with RPC does. The product has none, and
// what is refused beside --moe-slots is tested with its programs as they are.

#include "ggml-backend-impl.h"
#include "ggml-rpc.h"

namespace {

const struct registration {
    registration() { ggml_backend_register(ggml_backend_rpc_reg()); }
} at_start;

} // namespace
