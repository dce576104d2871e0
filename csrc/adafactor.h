// Adafactor (Shazeer and Stern, arXiv:1804.04235, as in torch.optim) over any number of parameters, in five launches
// after optim.h's `prepare`. optim.h describes the table `rows`, W, control, squares, g, and how a parameter is stored.
// States are float32, bfloat16, float16 or float64.
//
// A parameter of two or more dimensions is M consecutive matrices of R x C, with the states row (M, R) and col (M, C).
// Any other is a vector, with one state `variance` of its shape; its R and C are 0. eps1, eps2, d, wd belong to the
// group.
//
//   t = step,  b = t^decay (decay <= 0),  rho = min(lr, 1 / sqrt(t))
//   row += b (mean over columns of g^2 - row),  col += b (mean over rows of g^2 - col),  variance += b (g^2 - variance)
//   V = row col / max(mean of row over its matrix, eps1), or variance;  u = g / sqrt(max(V, eps1^2))
//   p = (1 - lr wd) p - max(eps2, RMS(p)) rho / max(1, RMS(u) / d) u           RMS over the whole parameter
//
//   sums      the sums of g^2 over rows and columns within each tile of a large matrix
//   factors   row, col, and sums of `row` over bands of kSide rows
//   norms     variance; partials[tile] = {sum of p^2, sum of u^2} over the tile
//   scale     scales[n] = the factor on g / sqrt(max(V, eps1^2)) that is subtracted from p, with g as stored: from the
//             partials of row n in order, and the gradients' factor. control[kNorm] = norm, if squares are given
//   update    p
//
// Each does nothing if an infinity was found. Sums are in W, those of partials in float64.
//
// shapes (N, kShape) int64 describes how a row is distributed. Matrices of at most kSmall elements are small, and each
// is processed by one lane of `factors`; the others are large. A tile is kSide x kSide of a large matrix (ordered by
// matrix, then band of kSide rows, then columns), or kTile consecutive elements of a vector or of small matrices. A
// block is the rows of one band, ordered by matrix, then band; after all of these, a block is kSide columns, counted
// over all matrices. For small matrices, a block is kSide matrices. tile_row (T,) and block_row (K,) int32 give the row
// of each tile and block; kFirstTile and kFirstBlock are a row's first ones. A row without elements has neither. work
// (S,): float32, float64 on the CPU. From kWork on it has, for row n, sums of `row` (M, bands), bands = ceil(R /
// kSide), and, for large matrices, row sums (ceil(C / kSide), M, R) and column sums (M, bands, C). partials (T, 2),
// scales (N,): float64.
//
// Random bits: the element at place k of a tile (in a large matrix, places are numbered kSide per row of the tile) uses
// half k % 8 of the words of counter `offset` + kTile / 8 tile + k / 8, as in optim.h.
#pragma once
#include "optim.h"

namespace hfnn {

struct Adafactor {
  static constexpr int64_t kSide = 128, kTile = kSide * kSide, kSmall = 64;
  enum Shape { kR, kC, kFirstTile, kFirstBlock, kWork, kShape };
  // Columns of hyper, in addition to Optim::kLr, kWeightDecay and kOptions.
  enum Hyper { kDecay = 1, kEps1 = 2, kEps2 = 3, kThreshold = 6 };

  void (*sums)(const Tensor& rows, const Tensor& shapes, const Tensor& tile_row, const Tensor& hyper,
               const Tensor& control, const Tensor& squares, const Tensor& work, int64_t queue);
  void (*factors)(const Tensor& rows, const Tensor& shapes, const Tensor& block_row, const Tensor& hyper,
                  const Tensor& control, const Tensor& squares, const Tensor& work, int64_t queue);
  void (*norms)(const Tensor& rows, const Tensor& shapes, const Tensor& tile_row, const Tensor& hyper,
                const Tensor& control, const Tensor& squares, const Tensor& work, const Tensor& partials,
                int64_t queue);
  void (*scale)(const Tensor& rows, const Tensor& shapes, const Tensor& hyper, const Tensor& control,
                const Tensor& squares, const Tensor& partials, const Tensor& scales, int64_t queue);
  // ema_decay, seed: see optim.h.
  void (*update)(const Tensor& rows, const Tensor& shapes, const Tensor& tile_row, const Tensor& hyper,
                 const Tensor& control, const Tensor& work, const Tensor& scales, double ema_decay, int64_t seed,
                 int64_t offset, int64_t queue);
};
extern const Adafactor adafactor_cpu;

}  // namespace hfnn
