#include "diagnostics/mismatch.h"

namespace hfreduce {

std::string told(const Call& call) {
  std::string text = std::string(name(call.kind)) + " number " + std::to_string(call.sequence);
  if (call.kind == Kind::barrier) return text;
  text += " of " + std::to_string(call.count) + " " + name(call.dtype);
  if (call.kind == Kind::all_reduce || call.kind == Kind::reduce || call.kind == Kind::reduce_scatter)
    text += std::string(", ") + name(call.op);
  if (call.root >= 0) text += ", root " + std::to_string(call.root);
  return text;
}

Fault mismatch(const std::vector<int>& ranks, const std::vector<std::string>& names, const std::vector<Call>& calls) {
  std::vector<std::vector<size_t>> groups;  // of those that agree
  for (size_t i = 0; i < calls.size(); ++i) {
    size_t g = 0;
    while (g < groups.size() && !same(calls[groups[g][0]], calls[i])) ++g;
    if (g == groups.size()) groups.emplace_back();
    groups[g].push_back(i);
  }
  size_t right = 0;
  for (size_t g = 1; g < groups.size(); ++g)
    if (groups[g].size() > groups[right].size()) right = g;
  std::string message = "ranks called different collectives:";
  std::vector<int> culprits;
  for (size_t g = 0; g < groups.size(); ++g) {
    message += "\n  ";
    for (size_t i : groups[g]) {
      message += names[i] + (i == groups[g].back() ? ": " : ", ");
      if (g != right) culprits.push_back(ranks[i]);
    }
    message += told(calls[groups[g][0]]);
  }
  message +=
      "\nEvery rank must call the same collectives, with the same dtype and number of elements, in the same order.";
  return Fault(Fault::Cause::mismatch, culprits, message);
}

}  // namespace hfreduce
