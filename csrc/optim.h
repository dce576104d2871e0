// One optimizer step over any number of parameters of any sizes and dtypes, in one launch.
//
// A step works on a table: rows (N, kColumns) int64, one row per parameter, with its addresses, sizes and codes in the
// columns below. All arrays of a row are dense, with the same order of elements. The table is rebuilt when an address
// changes, not at every step. A row's elements are split into tiles of kTile. owner (T,) int32 gives the row of each
// tile, and kFirstTile a row's first tile. A row without elements has no tiles.
//
// hyper (G, kHyper) float64: one row per parameter group. control (kControl,) float32: see below. W is the dtype of the
// arithmetic: float32, or float64 for float64 parameters (only on the CPU).
//
//   prepare   step += 1 for each row that has one, unless an infinity was found. If squares (P,) float64 is given,
//             squares[p] = the sum of (g / grad_scale)^2 over one part of all gradients, the P parts together covering
//             all. Sums are float32 within a tile, float64 above. The same bits in every run.
//   update    unless an infinity was found: one step of each element of each row. g is the gradient, divided by
//             grad_scale and, if squares are given, times the clip coefficient min(1, max_norm / (norm + 1e-6)), where
//             norm = sqrt(sum of squares); negated if the group maximizes. The gradients are not written to.
//             control[kNorm] = norm, even if an infinity was found.
//
//   adam   g += wd p (kDecoupled: p = (1 - lr wd) p);  m += (1 - b1)(g - m);  v = b2 v + (1 - b2) g g;  t = step
//          w = max(w, v) and u = w with kAmsgrad, else u = v
//          p -= lr / (1 - b1^t) m / (sqrt(u) / sqrt(1 - b2^t) + eps)              states m, v, w
//   sgd    g += wd p (kDecoupled: p = (1 - lr wd) p);  momentum: b = g at the first step (kFirst), else
//          b = mu b + (1 - damp) g;  then g = g + mu b with kNesterov, else g = b
//          p -= lr g                                                              state b, if mu != 0
//   lion   p = (1 - lr wd) p;  p -= lr sign(b1 m + (1 - b1) g);  m += (1 - b2)(g - m)      state m
//
// Powers and square roots of the coefficients are computed in float64, then rounded to W.
//
// A state is stored as float32, bfloat16, float16, float64, or as codes of 8 or 4 bits (two per byte, the even element
// in the low half). Codes are stored in blocks of kBlock consecutive elements of the row, the last one shorter. Each
// block has a float32 scale:
//   scale     the block's element of largest magnitude, with its sign (positive if both signs occur);
//             0 if that is less than 2^-100, so that nothing is subnormal: all x are then 0;
//             NaN if an element is not finite: all x are then NaN
//   x         value(m) scale, where value(m) is about (m / 2^t)^3: lb value(m) = 3 (lb m - t), with lb y = bits(y) /
//             2^23 - 127, the binary logarithm at powers of two and linear in between. Exact in float32, and 1 for
//             m = 2^t.
//   signed    t = 7 or 3: m from 1 - 2^t to 2^t, with value(-m) = -value(m) and value(0) = 0. The code is 2^t - 1 + m.
//   unsigned  t = 8 or 4: m from 1 to 2^t. The code is m - 1. No code stands for 0, as needed under a square root.
//   m         of x: the nearest to the m whose value is x / scale; of two, the one with the even code. In float32: the
//             nearest to 2^(t + 84) times the number with the bits bits(|x| (4 / |scale|)) / 3, rounded down, with the
//             sign of x / scale. (The bits of 4 value(m) are 3 bits(m 2^(-t - 84)): nothing is added to them.)
// So decoded values encode to the same scale and codes. States whose sign is known (v, w) are unsigned, the others
// signed. (Block-wise codes that are dense around 0: Dettmers et al. 2022, arXiv:2110.02861. v without 0: Li et al.
// 2023, arXiv:2309.01507.)
//
// The parameter is rounded to nearest, or, with `seed` and 16 bits, stochastically: random bits are added to its
// float32 bits below those that are kept, 16 for bfloat16 and 13 for float16 (within the normal numbers). The bits are
// drawn as in dropout.h: element e of the row uses half e % 8 (the low half of a word first) of the four words of
// counter `offset` + 512 tile + e / 8 % 512, with `tile` counted over the table. Or the parameter is bfloat16 with a
// remainder (int16): the float32 master's bits are (parameter << 16) + remainder, where the parameter is the master
// rounded half up in magnitude (NaN stays NaN).
// ema: ema += (1 - decay)(p - ema), with p as stored (the master, if there is one), float32.
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
  // kState..kState + 2 and kScale..kScale + 2: one per state. kStep: float32, 0 dimensions. An absent address is 0.
  // kCodes: parameter | gradient << 4 | state << 8, each a Format; all states of a row have one format.
  enum Format { kFloat32, kBfloat16, kFloat16, kFloat64, kInt8, kInt4 };
  enum Hyper { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kOptions, kMomentum = kBeta1, kDampening = kBeta2, kHyper = 8 };
  enum Options { kMaximize = 1, kDecoupled = 2, kAmsgrad = 4, kNesterov = 8 };  // per group
  enum Flags { kFirst = 1 };                                                    // per row
  enum Control { kFoundInf, kGradScale, kMaxNorm, kNorm, kControl };            // kGradScale: divisor of the gradients
  enum Rule { kAdam, kSgd, kLion };

  int64_t (*partials)(int64_t tiles);  // P
  void (*prepare)(const Tensor& rows, const Tensor& owner, const Tensor& control, const Tensor& squares, int64_t queue);
  // seed: -1 for rounding to nearest. ema_decay: -1 for none. Triton's update has one more argument, because its
  // kernels are compiled for what occurs: `features`, with the fields codes, amsgrad, remainder, ema: the different
  // values of kCodes, ascending (a tuple), and whether any row has each of the others.
  void (*update)(const Tensor& rows, const Tensor& owner, const Tensor& hyper, const Tensor& control,
                 const Tensor& squares, int64_t rule, double ema_decay, int64_t seed, int64_t offset, int64_t queue);
};
extern const Optim optim_cpu;

}  // namespace hfnn
