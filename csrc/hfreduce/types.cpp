// The names that people read: torch's own.
#include "types.h"

namespace hfreduce {

const char* name(DType dtype) {
  constexpr const char* names[] = {"uint8",   "int8",     "int16",   "int32",   "int64",         "bool",
                                   "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"};
  return names[static_cast<int>(dtype)];
}

const char* name(Op op) {
  constexpr const char* names[] = {"sum", "avg", "prod", "min", "max", "band", "bor", "bxor", "premul_sum"};
  return names[static_cast<int>(op)];
}

const char* name(Kind kind) {
  constexpr const char* names[] = {"barrier",    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
                                   "all_to_all", "gather",     "scatter",        "send",       "recv"};
  return names[static_cast<int>(kind)];
}

}  // namespace hfreduce
