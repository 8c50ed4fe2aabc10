#pragma once

// The flags as options of upstream's own parser (common/arg.cpp, the only file that includes this).

#include "moe-api.h"

#include "arg.h"
#include "common.h"

#include <utility>

// upstream's handlers capture nothing: each flag has a function of its own
template <size_t I>
void moe_apply_flag(common_params & params, const std::string & value) {
    moe_flags()[I].apply(params.kv_overrides, value);
}

template <typename Add, size_t... I>
void moe_add_options(const Add & add_opt, std::index_sequence<I...>) {
    const auto add = [&](size_t i, void (*handler)(common_params &, const std::string &)) {
        if (i < moe_flags().size()) {
            const moe_flag & flag = moe_flags()[i];
            add_opt(common_arg({ flag.name }, flag.value, flag.help, handler).set_env(flag.env));
        }
    };
    static_assert(sizeof...(I) == MOE_MAX_FLAGS, "one function a flag");
    (add(I, moe_apply_flag<I>), ...);
}

template <typename Add>
void moe_add_options(const Add & add_opt) {
    moe_add_options(add_opt, std::make_index_sequence<MOE_MAX_FLAGS>());
}
