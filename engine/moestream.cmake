# Joins the engine to upstream's targets. Included by upstream's top-level CMakeLists.txt (patches/), with MOESTREAM_ENGINE_DIR set.

set(MOESTREAM_SOURCES
    budget.cpp
    device-tier.cpp
    expert-ring.cpp
    header-check.cpp
    io-probe.cpp
    moe-files.cpp
    policy.cpp
    ram-tier.cpp
    router-guess.cpp
    reader.cpp
    router-map.cpp
    slot-pool.cpp
    stats.cpp
    stream.cpp
    trace.cpp
    trial.cpp
    uring.cpp
)
# the only ones that see upstream's internals
set(MOESTREAM_HOOKS
    hooks/buffers.cpp
    hooks/compute.cpp
    hooks/context.cpp
    hooks/devices.cpp
    hooks/graph.cpp
    hooks/guesses.cpp
    hooks/load-begin.cpp
    hooks/load-end.cpp
    hooks/load-guard.cpp
    hooks/load-layout.cpp
    hooks/load-slots.cpp
    hooks/model-files.cpp
    hooks/model.cpp
)
list(TRANSFORM MOESTREAM_SOURCES PREPEND "${MOESTREAM_ENGINE_DIR}/")
list(TRANSFORM MOESTREAM_HOOKS   PREPEND "${MOESTREAM_ENGINE_DIR}/")

find_package(Threads REQUIRED)

target_sources            (llama PRIVATE ${MOESTREAM_SOURCES} ${MOESTREAM_HOOKS})
target_include_directories(llama PUBLIC  $<BUILD_INTERFACE:${MOESTREAM_ENGINE_DIR}>)
target_link_libraries     (llama PRIVATE Threads::Threads)

# the CPU kernels, in however many variants, ask moe-gate.h
get_property(MOESTREAM_GGML_TARGETS DIRECTORY "${PROJECT_SOURCE_DIR}/ggml/src" PROPERTY BUILDSYSTEM_TARGETS)
foreach (target IN LISTS MOESTREAM_GGML_TARGETS)
    if (target MATCHES "^ggml-cpu")
        target_include_directories(${target} PRIVATE "${MOESTREAM_ENGINE_DIR}")
    endif()
endforeach()

# slots that a device looks after itself
if (TARGET ggml-cuda)
    target_sources(ggml-cuda PRIVATE "${MOESTREAM_ENGINE_DIR}/moe-cuda.cu")
    set_source_files_properties("${MOESTREAM_ENGINE_DIR}/moe-cuda.cu" TARGET_DIRECTORY ggml-cuda PROPERTIES LANGUAGE CUDA)
    # the only file of upstream's that knows of it
    set_source_files_properties("${PROJECT_SOURCE_DIR}/ggml/src/ggml-cuda/ggml-cuda.cu" TARGET_DIRECTORY ggml-cuda PROPERTIES
        INCLUDE_DIRECTORIES "${MOESTREAM_ENGINE_DIR}")
endif()

# upstream builds its sources as large units; ours keep their own static names
set_source_files_properties(${MOESTREAM_SOURCES} ${MOESTREAM_HOOKS} TARGET_DIRECTORY llama PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
set_source_files_properties(${MOESTREAM_HOOKS} TARGET_DIRECTORY llama PROPERTIES
    INCLUDE_DIRECTORIES "${PROJECT_SOURCE_DIR}/src;${PROJECT_SOURCE_DIR}/ggml/src")

# a library of upstream's, of headers alone
set_source_files_properties("${MOESTREAM_ENGINE_DIR}/router-map.cpp" TARGET_DIRECTORY llama PROPERTIES
    INCLUDE_DIRECTORIES "${PROJECT_SOURCE_DIR}/vendor")

if (TARGET llama-common)
    # the flags' parser checks names with the same functions as the engine
    target_sources(llama-common PRIVATE "${MOESTREAM_ENGINE_DIR}/moe-args.cpp")
    set_source_files_properties("${MOESTREAM_ENGINE_DIR}/moe-args.cpp" TARGET_DIRECTORY llama-common PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endif()

# replays traces: the same policies and slots, without a model
add_executable(moe-replay-policy
    "${MOESTREAM_ENGINE_DIR}/tools/moe-replay-policy.cpp"
    "${MOESTREAM_ENGINE_DIR}/trace-replay.cpp"
    "${MOESTREAM_ENGINE_DIR}/policy.cpp"
    "${MOESTREAM_ENGINE_DIR}/slot-pool.cpp"
    "${MOESTREAM_ENGINE_DIR}/trace.cpp")
target_include_directories(moe-replay-policy PRIVATE "${MOESTREAM_ENGINE_DIR}" "${PROJECT_SOURCE_DIR}/vendor")
target_link_libraries(moe-replay-policy PRIVATE Threads::Threads)
target_compile_features(moe-replay-policy PRIVATE cxx_std_17)

# a checkout has programs that test the engine inside upstream; an installed package does not
set(MOESTREAM_IDENTITY_DIR "${MOESTREAM_ENGINE_DIR}/../tests/identity")
if (TARGET llama-common AND EXISTS "${MOESTREAM_IDENTITY_DIR}/CMakeLists.txt")
    add_subdirectory("${MOESTREAM_IDENTITY_DIR}" "${CMAKE_BINARY_DIR}/moestream-identity")
endif()
