// Element types, reductions and kinds of collectives. Their numbers are used in Python and on the wire.
#pragma once

#include <chrono>
#include <cstdint>

namespace hfreduce {

enum class DType : uint8_t { u8, i8, i16, i32, i64, boolean, f16, bf16, f32, f64, e4m3, e5m2 };
enum class Op : uint8_t { sum, avg, prod, min, max, band, bor, bxor, premul_sum };
enum class Kind : uint8_t {
  barrier,
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  reduce,
  all_to_all,
  gather,
  scatter,
  send,
  recv,
};

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::i16:
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::i32:
    case DType::f32:
      return 4;
    case DType::i64:
    case DType::f64:
      return 8;
    default:
      return 1;
  }
}

// Names for people: torch's own.
inline const char* name(DType dtype) {
  static constexpr const char* names[] = {"uint8",   "int8",     "int16",   "int32",   "int64",         "bool",
                                          "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"};
  return names[static_cast<int>(dtype)];
}

inline const char* name(Op op) {
  static constexpr const char* names[] = {"sum", "avg", "prod", "min", "max", "band", "bor", "bxor", "premul_sum"};
  return names[static_cast<int>(op)];
}

inline const char* name(Kind kind) {
  static constexpr const char* names[] = {"barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                          "reduce",  "all_to_all", "gather",         "scatter",    "send",
                                          "recv"};
  return names[static_cast<int>(kind)];
}

// How elements are reduced. `factor` multiplies this rank's input, for premul_sum only.
struct Reduction {
  Op op = Op::sum;
  double factor = 1.0;
};

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;
using std::chrono::milliseconds;

// One collective, as called. All ranks must make the same call: see `same`. It is stored in shared memory and sent in
// headers, so it has a fixed layout and no pointers.
struct Call {
  uint64_t sequence = 0;  // of this communicator: 1, 2, ... (send and recv: of this pair and direction)
  int64_t count = 0;      // elements: of the whole input (all_reduce, broadcast, reduce), or of one rank's block
  double factor = 1.0;    // this rank's own; may differ between ranks
  int32_t root = -1;      // group rank; -1 if there is none
  Kind kind = Kind::barrier;
  DType dtype = DType::u8;
  Op op = Op::sum;
  uint8_t unused = 0;
};
static_assert(sizeof(Call) == 32);

inline bool same(const Call& a, const Call& b) {
  return a.sequence == b.sequence && a.count == b.count && a.root == b.root && a.kind == b.kind && a.dtype == b.dtype &&
         a.op == b.op;
}

inline Call call_of(Kind kind, int64_t count, DType dtype, Reduction reduction = {}, int root = -1) {
  Call call;
  call.kind = kind, call.count = count, call.dtype = dtype, call.root = root;
  call.op = reduction.op, call.factor = reduction.factor;
  return call;
}

}  // namespace hfreduce
