"""The accuracy rule, written once.

Against a float64 reference, the error of a result is at most `at_most` times the error of torch's own op in the same
dtype, or half an ulp of the result if torch's error is smaller (one ulp for a result of one number). Errors are
measured twice: in the L2 norm relative to the reference, which detects a bias, and as the largest error relative to the
largest value, which detects a single wrong element. A single sum of n terms may also have an error of sqrt(n) half
ulps, as n roundings have in any order (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SISC
2019). torch's order of summation, and so the chance error of one element, differs between processors.
"""

from dataclasses import dataclass

import torch

OUTPUTS, GRADIENTS = 2.0, 3.0  # how many times torch's own error


@dataclass(frozen=True)
class Error:
    """Distance from a float64 reference: relative L2, and largest absolute over largest reference value."""

    l2: float
    largest: float

    def within(self, of: "Error", dtype: torch.dtype, at_most: float, terms: int = 1) -> bool:
        least = torch.finfo(dtype).eps / 2
        one = terms**0.5 * least
        return self.l2 <= max(at_most * of.l2, least) and self.largest <= max(at_most * of.largest, one)


def error(result: torch.Tensor, reference: torch.Tensor) -> Error:
    """The distance of `result` from `reference` (float64, same shape); infinite if NaNs or infinities do not match."""
    result, reference = result.detach().cpu().double(), reference.detach().cpu().double()
    finite = reference.isfinite()
    if result.shape != reference.shape or not torch.equal(
        result.where(~finite, 0).nan_to_num(nan=1.0), reference.where(~finite, 0).nan_to_num(nan=1.0)
    ):
        return Error(float("inf"), float("inf"))
    if not result.where(finite, 0).isfinite().all():
        return Error(float("inf"), float("inf"))
    difference, size = (result - reference).where(finite, 0), reference.where(finite, 0)
    if size.numel() == 0:
        return Error(0.0, 0.0)
    smallest = torch.finfo(torch.float64).tiny
    return Error(
        (difference.norm() / size.norm().clamp_min(smallest)).item(),
        (difference.abs().max() / size.abs().max().clamp_min(smallest)).item(),
    )


def assert_close(result, reference, of, at_most: float = OUTPUTS, name: str = "result", terms: int = 1) -> None:
    """Raise AssertionError unless `result` keeps the accuracy rule; `of` is torch's own result in the same dtype.

    terms: the number of terms of each sum in the result, if they are added in the result's own dtype.
    """
    assert result.dtype is of.dtype, f"{name} is {result.dtype}, torch's is {of.dtype}"
    assert result.shape == reference.shape, f"{name} has shape {tuple(result.shape)}, wanted {tuple(reference.shape)}"
    mine, torchs = error(result, reference), error(of, reference)
    held = mine
    if result.numel() == 1:  # torch's error is random and may be zero: it counts as half an ulp
        half_ulp = torch.finfo(result.dtype).eps / 2
        torchs = Error(max(torchs.l2, half_ulp), max(torchs.largest, half_ulp))
        # For one element the norm is the element, which is a sum of `terms`. Over 60 draws of linear_distillation, the
        # error of torch's loss was 0.8 half ulps in the median and 3.2 at most, ours 0.8 and 3.1.
        held = Error(0.0, mine.largest)
    assert held.within(torchs, result.dtype, at_most, terms), (
        f"{name} {result.dtype} {tuple(result.shape)}: error {mine.l2:.3g} (largest {mine.largest:.3g}), torch's own "
        f"{torchs.l2:.3g} ({torchs.largest:.3g}); at most {at_most:g} times that, or half an ulp "
        f"{torch.finfo(result.dtype).eps / 2:.3g}" + (f" times the root of {terms}" if terms > 1 else "")
    )
