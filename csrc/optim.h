// One step of an optimizer over any number of parameters of any sizes and dtypes, in one launch.
//
// What a step works on is a table: rows (N, kColumns) int64, a parameter each, and its addresses, sizes and codes in
// the columns below. All that a row points to is dense and in the same order of elements. The table is made when an
// address changes, not at every step. The elements of a row go by tiles of kTile; owner (T,) int32 names the row of
// each tile, and `first` of a row is its first tile. A row of no elements has no tiles.
//
// hyper (G, kHyper) float64: what the parameter groups say, a row each. control (kControl,) float32: see below.
// W is the dtype of the arithmetic: float32, or float64 for a row whose parameter is float64 (on the CPU alone).
//
//   prepare   step += 1 of each row that has one, where nothing was found infinite; and, where squares (P,) float64 is
//             given, squares[p] = sum of (g / grad_scale)^2 over a run of all gradients, of which the P add up to all:
//             sums of float32 within a tile, of float64 above. The same bits in every run.
//   update    where nothing was found infinite: one step of each element of each row. g is the gradient, divided by
//             grad_scale, times the clip coefficient min(1, max_norm / (norm + 1e-6)), norm = sqrt(sum of squares),
//             where squares are given; negated where the group maximizes. The gradients are not written to.
//             control[kNorm] = norm, also where something was found infinite.
//
//   adam   g += wd p (kDecoupled: p -= lr wd p);  m += (1 - b1)(g - m);  v = b2 v + (1 - b2) g g;  t = step
//          w = max(w, v) and u = w where kAmsgrad is set, else u = v
//          p -= lr / (1 - b1^t) m / (sqrt(u) / sqrt(1 - b2^t) + eps)              states m, v, w
//   sgd    g += wd p (kDecoupled: p -= lr wd p);  momentum: b = g at the first step (kFirst), else
//          b = mu b + (1 - damp) g; and g = g + mu b where kNesterov is set, else g = b
//          p -= lr g                                                              state b, where mu != 0
//   lion   p -= lr wd p;  p -= lr sign(b1 m + (1 - b1) g);  m += (1 - b2)(g - m)      state m
//
// Powers and square roots of the coefficients are taken in float64, then rounded to W.
//
// A state is kept as float32, bfloat16, float16, float64, or as codes of 8 or of 4 bits (two to a byte, the even
// element in the low half), in blocks of kBlock consecutive elements of the row, the last one shorter, with a float32
// scale for each:
//   scale     the block's element of largest magnitude, with its sign (the positive one where there are both);
//             0, as all x then are, where that is less than 2^-100, so that nothing is subnormal;
//             NaN, as all x then are, where one of them is not finite
//   x         value(m) scale, where value(m) is about (m / 2^t)^3: with lb y = bits(y) / 2^23 - 127, the binary
//             logarithm at powers of two and a straight line between them, lb value(m) = 3 (lb m - t). Exact in
//             float32, and 1 for m = 2^t.
//   signed    t = 7 or 3: m from 1 - 2^t to 2^t, of value(-m) = -value(m), value(0) = 0. Its code is 2^t - 1 + m.
//   unsigned  t = 8 or 4: m from 1 to 2^t. Its code is m - 1. None stands for 0, which is wanted: it stands under a
//             root.
//   m         of x: the nearest to what has the value x / scale; of two, the one of even code. In float32: the nearest
//             to 2^(t + 84) times the number of the bits bits(|x| (4 / |scale|)) / 3, rounded down, with the sign of
//             x / scale. (The bits of 4 value(m) are 3 bits(m 2^(-t - 84)): nothing is added to them.)
// So what codes decode to has the same scale and codes again. States of which the sign is known (v, w) are unsigned,
// the others signed. (Codes of blocks, dense about 0, are from Dettmers et al. 2022, arXiv:2110.02861; that v wants
// no 0 is from Li et al. 2023, arXiv:2309.01507.)
//
// The parameter: rounded to nearest; or, where `seed` is given and it is 16 bits wide, stochastically: of its float32
// bits, bfloat16 keeps those left after adding 16 random ones below (float16: 13, within the normal numbers); bits as
// dropout.h draws them: element e of the row uses half e % 8 (the low half of a word first) of the four words of
// counter `offset` + 512 tile + e / 8 % 512, tile counted over the table. Or it is bfloat16 with a remainder (int16):
// the float32 master's bits are (parameter << 16) + remainder, the parameter being the master rounded half up in
// magnitude (NaN stays NaN).
// ema: ema += (1 - decay)(p - ema), p as it is kept (the master where there is one), float32.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Optim {
  static constexpr int64_t kTile = 4096, kBlock = 256;
  enum Column {
    kParam,
    kGrad,
    kState,
    kScale = 5,
    kRemainder = 8,
    kEma,
    kStep,
    kNumel,
    kFirstTile,
    kCodes,
    kGroup,
    kFlags,
    kColumns
  };
  // kState..kState + 2 and kScale..kScale + 2: one for each state. kStep: float32, 0 dimensions. An absent one is 0.
  // kCodes: parameter | gradient << 4 | state << 8, each a Format; all states of a row have one format.
  enum Format { kFloat32, kBfloat16, kFloat16, kFloat64, kInt8, kInt4 };
  enum Hyper { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kOptions, kMomentum = kBeta1, kDampening = kBeta2, kHyper = 8 };
  enum Options { kMaximize = 1, kDecoupled = 2, kAmsgrad = 4, kNesterov = 8 };  // of a group
  enum Flags { kFirst = 1 };                                                    // of a row
  enum Control { kFoundInf, kGradScale, kMaxNorm, kNorm, kControl };  // kGradScale: gradients are divided by it
  enum Rule { kAdam, kSgd, kLion };

  int64_t (*partials)(int64_t tiles);  // P
  void (*prepare)(const Tensor& rows, const Tensor& owner, const Tensor& control, const Tensor& squares, int64_t queue);
  // seed: -1 for rounding to nearest. ema_decay: -1 where there is none.
  // In Triton, where a kernel is compiled for what occurs, update has one more argument: `features`, with the fields
  // codes, amsgrad, remainder, ema: the different values of kCodes, ascending (a tuple), and whether any row has each
  // of the others.
  void (*update)(const Tensor& rows, const Tensor& owner, const Tensor& hyper, const Tensor& control,
                 const Tensor& squares, int64_t rule, double ema_decay, int64_t seed, int64_t offset, int64_t queue);
};
extern const Optim optim_cpu;

}  // namespace hfnn
