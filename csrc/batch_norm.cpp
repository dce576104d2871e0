// Batch normalisation on the CPU: checks, and how a call is split over threads.
#include "batch_norm_planes.h"
#include "batch_norm_rows.h"

namespace hfnn {

namespace {
using Call = BatchNormCall;

// weight and bias in the dtype of the arithmetic. Must outlive the call.
class Parameters {
 public:
  Parameters(const Tensor& weight, const Tensor& bias, const Tensor& x)
      : w_(weight, wide(x.dtype), x.shape[1], 1), b_(bias, wide(x.dtype), x.shape[1], -0.0) {}
  void lend(Call& c) const {
    c.weight.data = const_cast<void*>(w_.as<void>());
    c.bias.data = const_cast<void*>(b_.as<void>());
  }

 private:
  Vector w_, b_;
};
}  // namespace

// Sums the chunks into the first row of each half of partials, and derives the parameters' gradients.
static void finish_sums(const Call& c) {
  const int64_t C = c.channels(), chunks = c.partials.shape[1];
  with_wide(c.x.dtype, [&](auto wide) {
    using W = decltype(wide);
    for (int64_t which = 0; which < 2; ++which) {
      W* sums = c.partials.as<W>() + which * chunks * C;
      for (int64_t k = 0; k < C; ++k) {
        double total = 0;
        for (int64_t chunk = 0; chunk < chunks; ++chunk) total += double(sums[chunk * C + k]);
        sums[k] = W(total);
      }
      const Tensor& out = which ? c.dbias : c.dweight;
      with_dtype(out.dtype, [&](auto stored) {
        using R = decltype(stored);
        for (int64_t k = 0; k < C; ++k) store(out.as<R>()[k], static_cast<Wide<R>>(sums[k]));
      });
    }
  });
}

static void expect_channels(const char* name, const Tensor& t, const Tensor& x, bool wide_dtype) {
  expect_shape(name, t, {x.shape[1]});
  if (wide_dtype)
    expect_dtype(name, t, wide(x.dtype));
  else
    expect_floating(name, t.dtype);
}

static void check(const Call& c, const Tensor& weight, const Tensor& bias) {
  const Tensor& x = c.x;
  expect_floating("x", x.dtype);
  HFNN_CHECK_EQ(x.dims, 3);
  expect_alike("x", x, x);
  HFNN_CHECK(x.numel() > 0);
  HFNN_CHECK(c.kind >= 0 && c.kind < (c.residual || c.bits ? kPiecewise + 1 : kKinds));
  const std::pair<const char*, const Tensor&> alike[] = {
      {"y", c.y}, {"residual", c.residual}, {"dx", c.dx}, {"dresidual", c.dresidual}};
  for (const auto& [name, t] : alike)
    if (t) expect_alike(name, t, x);
  HFNN_CHECK(c.bits || !c.dresidual);  // for the identity, dresidual is dy
  expect_channels("mean", c.mean, x, true);
  expect_channels("rstd", c.rstd, x, true);
  const std::pair<const char*, const Tensor&> by_channel[] = {
      {"weight", weight},     {"bias", bias},    {"running_mean", c.running_mean}, {"running_var", c.running_var},
      {"dweight", c.dweight}, {"dbias", c.dbias}};
  for (const auto& [name, t] : by_channel)
    if (t) expect_channels(name, t, x, false);
  if (c.bits) {
    expect_dtype("bits", c.bits, Dtype::uint8);
    if (x.shape[2] == 1)
      expect_shape("bits", c.bits, {packed_bytes(x.numel(), 1)});
    else
      expect_shape("bits", c.bits, {x.shape[0], x.shape[1], packed_bytes(x.shape[2], 1)});
  }
  if (c.partials) {
    const int64_t kept = c.forward ? 3 : 2;
    expect_shape("partials", c.partials, {kept, count_chunks(x.shape[0], x.shape[1], x.shape[2]), x.shape[1]});
    expect_dtype("partials", c.partials, wide(x.dtype));
  }
}

using Part = void (*)(const Call&, int64_t, int64_t);

static void split_parts(const Call& c, int64_t count, Part part, int64_t threads) {
  split(count, c.x.numel(), threads, [&](int64_t begin, int64_t end) { part(c, begin, end); });
}

// Processes all elements. If by_channel, `planes` computes the statistics itself.
static void split_elements(const Call& c, Part planes, Part rows, int64_t threads) {
  if (c.size() != 1) return split_parts(c, by_channel(c) ? c.channels() : c.planes() * c.channels(), planes, threads);
  split_runs(c.x.numel(), threads, [&](int64_t begin, int64_t end) { rows(c, begin, end); });
}

static void forward(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual, const Tensor& y,
                    const Tensor& bits, const Tensor& mean, const Tensor& rstd, const Tensor& running_mean,
                    const Tensor& running_var, const Tensor& partials, double momentum, double eps, int64_t kind,
                    double slope, int64_t threads) {
  Call c;
  c.x = x, c.residual = residual, c.y = y, c.bits = bits, c.mean = mean, c.rstd = rstd;
  c.running_mean = running_mean, c.running_var = running_var, c.partials = partials;
  c.kind = kind, c.slope = slope, c.momentum = momentum, c.eps = eps, c.training = c.forward = true;
  check(c, weight, bias);
  HFNN_CHECK(y && partials);
  const Parameters parameters(weight, bias, x);
  parameters.lend(c);
  if (c.size() == 1) {
    split_parts(c, partials.shape[1], rows_moments, threads);
    rows_settle(c);
  } else if (!by_channel(c)) {
    split_parts(c, c.channels(), planes_moments, threads);
  }
  split_elements(c, planes_forward, rows_forward, threads);
}

static void rebuild(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual, const Tensor& y,
                    const Tensor& bits, const Tensor& mean, const Tensor& rstd, int64_t kind, double slope,
                    int64_t threads) {
  Call c;
  c.x = x, c.residual = residual, c.y = y, c.bits = bits, c.mean = mean, c.rstd = rstd, c.kind = kind, c.slope = slope;
  check(c, weight, bias);
  HFNN_CHECK(y);
  const Parameters parameters(weight, bias, x);
  parameters.lend(c);
  split_elements(c, planes_forward, rows_forward, threads);
}

static void backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& bits,
                     const Tensor& mean, const Tensor& rstd, const Tensor& dx, const Tensor& dresidual,
                     const Tensor& dweight, const Tensor& dbias, const Tensor& partials, bool training, int64_t kind,
                     double slope, int64_t threads) {
  Call c;
  c.x = x, c.y = dy, c.bits = bits, c.mean = mean, c.rstd = rstd, c.partials = partials, c.dx = dx;
  c.dresidual = dresidual, c.dweight = dweight, c.dbias = dbias, c.kind = kind, c.slope = slope, c.training = training;
  c.sums = dweight || dbias || (dx && training);
  check(c, weight, bias);
  HFNN_CHECK(dy && (partials || !c.sums));
  const Parameters parameters(weight, bias, x);
  parameters.lend(c);
  const bool rows = c.size() == 1, apart = rows || !by_channel(c);
  if (c.sums && rows) split_parts(c, partials.shape[1], rows_sums, threads);
  if (c.sums && apart && !rows) split_parts(c, c.channels(), planes_sums, threads);
  if (c.sums && rows) finish_sums(c);
  if (!apart || dx || (dresidual && !c.sums)) split_elements(c, planes_backward, rows_backward, threads);
  if (c.sums && !rows) finish_sums(c);
}

const BatchNorm batch_norm_cpu = {count_chunks, forward, rebuild, backward};

}  // namespace hfnn
