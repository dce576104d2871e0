// Checks whose messages show the compared values. A failed check becomes Python's ValueError.
#pragma once
#include <sstream>
#include <stdexcept>

#include "tensor.h"

namespace hfnn {

inline const char* name(Dtype dtype) {
  constexpr const char* names[] = {"None",  "float32", "bfloat16", "float16", "float64",
                                   "int64", "uint8",   "int32",    "int16",   "another dtype"};
  return names[static_cast<int>(dtype)];
}
inline std::ostream& operator<<(std::ostream& out, Dtype dtype) { return out << name(dtype); }

template <class A, class B>
[[noreturn]] void fail_eq(const char* a_text, const char* b_text, const A& a, const B& b) {
  std::ostringstream message;
  message << a_text << " must equal " << b_text << ", got " << a << " and " << b;
  throw std::invalid_argument(message.str());
}

[[noreturn]] inline void fail(const char* text) {
  std::ostringstream message;
  message << "needs " << text;
  throw std::invalid_argument(message.str());
}

}  // namespace hfnn

#define HFNN_CHECK_EQ(a, b)                                           \
  do {                                                                \
    const auto hfnn_a = (a);                                          \
    const auto hfnn_b = (b);                                          \
    if (!(hfnn_a == hfnn_b)) ::hfnn::fail_eq(#a, #b, hfnn_a, hfnn_b); \
  } while (0)

#define HFNN_CHECK(condition)                   \
  do {                                          \
    if (!(condition)) ::hfnn::fail(#condition); \
  } while (0)
