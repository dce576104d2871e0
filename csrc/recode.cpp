// Codes of 16-bit numbers on the CPU: table lookups, packed into five bits each.
#include "recode.h"

#include "cpu.h"

namespace hfnn {

namespace {
constexpr int64_t kPatterns = 1 << 16;
constexpr int kWidth = 5;
}  // namespace

static int64_t packed_bytes(int64_t codes) { return (codes * kWidth + 7) / 8; }

static void expect_half(const char* tensor, const Tensor& t) {
  expect_alike(tensor, t, t);
  if (t.dtype != Dtype::bfloat16 && t.dtype != Dtype::float16) refuse(tensor, "be bfloat16 or float16", name(t.dtype));
}

static void expect_packed(const Tensor& packed, const Tensor& x) {
  expect_shape("packed", packed, {packed_bytes(x.numel())});
  expect_dtype("packed", packed, Dtype::uint8);
}

static void expect_lut(const char* tensor, const Tensor& t, Dtype dtype) {
  expect_shape(tensor, t, {kPatterns});
  expect_dtype(tensor, t, dtype);
}

// Eight codes are five bytes, and runs are multiples of eight elements, so every run starts at a byte boundary.
static_assert(kRun % 8 == 0);

static void encode(const Tensor& x, const Tensor& rank, const Tensor& packed, int64_t threads) {
  expect_half("x", x);
  expect_lut("rank", rank, Dtype::uint8);
  expect_packed(packed, x);
  const auto* patterns = x.as<uint16_t>();
  const auto* ranks = rank.as<uint8_t>();
  auto* bytes = packed.as<uint8_t>();
  split_runs(x.numel(), threads, [=, elements = x.numel()](int64_t begin, int64_t end) {
    for_runs(elements, begin, end, [=](int64_t first, int64_t n) {
      for (int64_t i = first; i < first + n; i += 8) {
        const int64_t count = std::min<int64_t>(8, first + n - i);
        uint64_t codes = 0;
        for (int64_t k = 0; k < count; ++k) codes |= uint64_t(ranks[patterns[i + k]]) << (kWidth * k);
        uint8_t* out = bytes + i / 8 * kWidth;
        for (int64_t k = 0; k < packed_bytes(count); ++k) out[k] = uint8_t(codes >> (8 * k));
      }
    });
  });
}

static void decode(const Tensor& y, const Tensor& packed, const Tensor& start, const Tensor& table, const Tensor& x,
                   int64_t threads) {
  expect_half("y", y);
  expect_packed(packed, y);
  expect_lut("start", start, Dtype::int32);
  expect_lut("table", table, Dtype::int16);
  expect_alike("x", x, y);
  const auto* patterns = y.as<uint16_t>();
  const auto* starts = start.as<int32_t>();
  const auto* found = table.as<uint16_t>();
  const auto* bytes = packed.as<uint8_t>();
  auto* out = x.as<uint16_t>();
  split_runs(y.numel(), threads, [=, elements = y.numel()](int64_t begin, int64_t end) {
    for_runs(elements, begin, end, [=](int64_t first, int64_t n) {
      for (int64_t i = first; i < first + n; i += 8) {
        const int64_t count = std::min<int64_t>(8, first + n - i);
        const uint8_t* in = bytes + i / 8 * kWidth;
        uint64_t codes = 0;
        for (int64_t k = 0; k < packed_bytes(count); ++k) codes |= uint64_t(in[k]) << (8 * k);
        // A y that no x gives has no entry. The index is cut to 16 bits, so it stays inside the table.
        for (int64_t k = 0; k < count; ++k)
          out[i + k] = found[uint16_t(starts[patterns[i + k]] + (codes >> (kWidth * k) & 31))];
      }
    });
  });
}

const Recode recode_cpu = {encode, decode};

}  // namespace hfnn
