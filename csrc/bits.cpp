// Packed bits on the CPU.
#include "bits.h"

#include "bits_cpu.h"

namespace hfnn {

namespace {
struct Call {
  uint8_t *codes, *packed;
  int64_t n, width;
};
}  // namespace

// Calls f with the width as a compile-time constant.
template <class F>
HFNN_INLINE void with_width(int64_t width, F f) {
  if (width == 1) f(std::integral_constant<int, 1>{});
  if (width == 2) f(std::integral_constant<int, 2>{});
  if (width == 4) f(std::integral_constant<int, 4>{});
  if (width == 5) f(std::integral_constant<int, 5>{});
  if (width == 8) f(std::integral_constant<int, 8>{});
}

// 1024 codes fill whole bytes at every width, so each run starts at a byte boundary.
HFNN_CLONES static void pack_runs(const Call& call, int64_t begin, int64_t end) {
  with_width(call.width, [&](auto w) HFNN_FLAT {
    for_runs(call.n, begin, end, [&](int64_t i, int64_t n) HFNN_FLAT {
      pack_run<decltype(w)::value>(call.codes + i, call.packed + i / 8 * call.width, n);
    });
  });
}

HFNN_CLONES static void unpack_runs(const Call& call, int64_t begin, int64_t end) {
  with_width(call.width, [&](auto w) HFNN_FLAT {
    for_runs(call.n, begin, end, [&](int64_t i, int64_t n) HFNN_FLAT {
      unpack_run<decltype(w)::value>(call.packed + i / 8 * call.width, call.codes + i, n);
    });
  });
}

static Call checked(const Tensor& codes, const Tensor& packed, int64_t width) {
  if (width != 1 && width != 2 && width != 4 && width != 5 && width != 8)
    refuse("width", "be 1, 2, 4, 5 or 8", std::to_string(width));
  expect_dtype("codes", codes, Dtype::uint8);
  expect_alike("codes", codes, codes);
  expect_shape("packed", packed, {packed_bytes(codes.numel(), width)});
  expect_dtype("packed", packed, Dtype::uint8);
  return {codes.as<uint8_t>(), packed.as<uint8_t>(), codes.numel(), width};
}

static void pack(const Tensor& codes, const Tensor& packed, int64_t width, int64_t threads) {
  const Call call = checked(codes, packed, width);
  split_runs(call.n, threads, [&](int64_t begin, int64_t end) { pack_runs(call, begin, end); });
}

static void unpack(const Tensor& packed, const Tensor& codes, int64_t width, int64_t threads) {
  const Call call = checked(codes, packed, width);
  split_runs(call.n, threads, [&](int64_t begin, int64_t end) { unpack_runs(call, begin, end); });
}

const Bits bits_cpu = {pack, unpack};

}  // namespace hfnn
