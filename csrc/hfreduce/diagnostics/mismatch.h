// Ranks that called different things.
#pragma once

#include <string>
#include <vector>

#include "diagnostics/fault.h"

namespace hfreduce {

std::string told(const Call& call);  // "all_reduce number 7 of 1024 float32, sum"

// calls[i] is what rank ranks[i], called names[i], asked for. The culprits are the ranks outside the largest group that
// agrees (the one with the lowest rank among equally large ones). The same message wherever the same is given.
Fault mismatch(const std::vector<int>& ranks, const std::vector<std::string>& names, const std::vector<Call>& calls);

}  // namespace hfreduce
