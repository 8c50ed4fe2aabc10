#pragma once

// every policy, for the suites that hold for all of them

#include "policy.h"

#include <vector>

inline std::vector<moe::policy_kind> all_policies() {
    std::vector<moe::policy_kind> kinds;
    for (moe::policy_kind kind = moe::policy_kind::lru; ; ) {
        kinds.push_back(kind);
        // no default: a policy that is missing here does not compile (-Werror=switch)
        switch (kind) {
            case moe::policy_kind::lru:  kind = moe::policy_kind::lfu;  break;
            case moe::policy_kind::lfu:  kind = moe::policy_kind::heat; break;
            case moe::policy_kind::heat: return kinds;
        }
    }
}
