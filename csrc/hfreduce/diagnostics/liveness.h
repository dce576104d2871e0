// What monitors say to one another: a head (message, bytes) and a body.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "diagnostics/fault.h"

namespace hfreduce::liveness {

enum class Message : uint32_t {
  request = 1,  // a number: "where do you stand?"
  status,       // the number, a RankStatus: at once, or as soon as Python has said where it is
  fault,        // cause, culprits, text: "this has failed for all of us"
  goodbye,      // "the end of this connection is no death"; or, as in a fault, of what the rank has died
};

struct Head {
  Message message;
  uint32_t bytes;  // of the body
};

constexpr uint32_t kLongest = 1 << 20;

template <class T>
void put(std::string& to, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  to.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Takes a value off the front; false when there is too little.
template <class T>
bool get(std::string_view& from, T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (from.size() < sizeof(value)) return false;
  std::memcpy(&value, from.data(), sizeof(value));
  from.remove_prefix(sizeof(value));
  return true;
}

std::string framed(Message message, const std::string& body);
std::string encode(const Fault& fault);
std::optional<Fault> decode_fault(std::string_view body);  // none when it is no fault

}  // namespace hfreduce::liveness
