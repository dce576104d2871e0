#include "diagnostics/liveness.h"

namespace hfreduce::liveness {

std::string framed(Message message, const std::string& body) {
  std::string out;
  put(out, Head{message, static_cast<uint32_t>(body.size())});
  return out + body;
}

std::string encode(const Fault& fault) {
  std::string body;
  put(body, static_cast<int32_t>(fault.cause));
  put(body, static_cast<int32_t>(fault.ranks.size()));
  for (int rank : fault.ranks) put(body, static_cast<int32_t>(rank));
  const std::string text = fault.what();
  return body + text.substr(0, kLongest - body.size());
}

std::optional<Fault> decode_fault(std::string_view body) {
  int32_t cause, n;
  if (!get(body, cause) || !get(body, n) || cause < 0 || cause > static_cast<int32_t>(Fault::Cause::broken))
    return std::nullopt;
  std::vector<int> ranks;
  for (int32_t rank; n > 0; --n, ranks.push_back(rank))
    if (!get(body, rank)) return std::nullopt;
  return Fault(static_cast<Fault::Cause>(cause), ranks, std::string(body));
}

}  // namespace hfreduce::liveness
