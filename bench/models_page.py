"""docs/models.md, written from the results of architectures.py."""

import re
import statistics

LEAST = 0.6  # rows below this have a reason in the page

HEAD = """# Architectures

Every architecture that transformers {version} lists in its auto classes, tiny and with random weights, stock and after
`hfnn.convert(model, prefer="memory")`. `python bench/architectures.py` writes this page: torch {torch}, float32, in
training mode, dropout 0, on the CPU. A row is a model type, with one of its classes; a class that several types share
is listed once.

* **modules**: of those that hfnn has ops for (norms, activations, dropouts, linear maps, embeddings, pools, losses),
  how many were swapped.
* **stock, hfnn**: KB that autograd keeps from forward to backward, without parameters, and without gradients of
  parameters that a fused loss computes in forward.
* **floor**: the minimum for exact gradients without running a product twice. Stock's forward is recorded op by op.
  What backward needs is either kept, or recomputed from what is kept. Only ops that torch.compile's partitioner
  recomputes, too, may be recomputed: elementwise ones, norms, softmax, sums, copies, pools. Matrix products,
  convolutions, attention, embeddings, sorting, scatters and random numbers run once. The cheapest choice is a minimum
  cut of that graph (`bench/floor.py`). With a cross-entropy, the gradient of the last product's input counts instead
  of the logits.
* **saved**: the part of the bytes between stock and floor that hfnn saves; "-" if there are less than 2 %. It is above
  100 % if hfnn packs indices and signs into bits, or uses attention for what torch's ops write out.
* **equal**: loss and the gradient of each parameter against float64, by the rule of `hfnn/testing.py`, as in
  `hfnn.verify`. A tensor counts as wrong if it breaks the rule in three draws of the inputs. "f32": the model does not
  run in float64, so it is compared with stock's float32, within 1e-4.
* **revert**: classes, attributes, parameters, loss and gradients are restored, bitwise.

A model of images and text gets both if guessed inputs work, otherwise text only.
"""


LOW = f"""## Below {LEAST:.0%}

The module classes that keep what could be recomputed: the share of what could be saved, and the ops that produced it.
"""


def line(result) -> str:
    """A result in one line, for the terminal."""
    if result.error:
        return f"{result.kind}: {result.stage}: {result.error}"
    share = "-" if result.share is None else f"{result.share:.0%}"
    wrong = "equal" if not result.wrong else f"{len(result.wrong)} tensors differ"
    return f"{result.kind}: {share} saved, {wrong}, {result.seconds:.1f} s"


def page(results, versions: dict[str, str]) -> str:
    built = [r for r in results if r.stock]
    parts = [HEAD.format(**versions), summary(results, built), table(built)]
    low = [r for r in built if r.share is not None and r.share < LEAST]
    if low:
        low.sort(key=lambda r: r.share)
        parts += [LOW, "\n".join(f"* **{r.kind}** ({r.share:.0%}): {reason(r)}" for r in low) + "\n"]
    failed = [r for r in built if r.error or r.wrong or r.not_reverted]
    if failed:
        parts += ["## Failures\n"]
        parts += ["\n".join(f"* **{r.kind}** ({r.stage}): {failure(r)}" for r in failed) + "\n"]
    left = [r for r in results if not r.stock]
    if left:
        parts += ["## Not built\n", "\n".join(f"* {r.kind} ({r.name}): {plain(r.error)}" for r in left) + "\n"]
    return "\n".join(parts)


def summary(results, built) -> str:
    shares = [r.share for r in built if r.share is not None]
    median = f"the median share saved is {statistics.median(shares):.0%}" if shares else "nothing is to save"
    low = sum(share < LEAST for share in shares)
    wrong, back = sum(bool(r.wrong) for r in built), sum(bool(r.not_reverted) for r in built)
    failed = sum(bool(r.error) for r in built)
    return (
        f"{len(built)} of {len(results)} were built: {median}, {low} are below {LEAST:.0%}; "
        f"{wrong} differ from stock, {back} are not restored exactly, {failed} fail.\n"
    )


def table(built) -> str:
    rows = ["| model type | class | modules | stock | hfnn | floor | saved | equal | revert |", "| --- " * 9 + "|"]
    for r in built:
        share = "-" if r.share is None else f"{r.share:.0%}"
        equal = "-" if r.wrong is None else "no" if r.wrong else "yes" if r.reference == "float64" else "yes, f32"
        revert = "-" if r.not_reverted is None else "no" if r.not_reverted else "yes"
        modules = f"{r.converted} of {r.modules}" + (f", {r.converted / r.modules:.0%}" if r.modules else "")
        sizes = " | ".join(f"{n / 1000:,.0f}" for n in (r.stock, r.ours, r.floor))
        rows.append(f"| {r.kind} | {r.name} | {modules} | {sizes} | {share} | {equal} | {revert} |")
    return "\n".join(rows) + "\n"


def reason(result) -> str:
    """The largest gaps: as many as would bring the share to `LEAST`, at least a third."""
    if not result.gaps:
        return "no single module keeps much"
    parts, covered = [], result.share
    for gap, cls, what in result.gaps:
        if parts and (covered >= 0.9 or len(parts) == 3):
            break
        covered += gap
        parts.append(f"{cls} {min(gap, 1):.0%}" + (f" ({plain(what)})" if what else ""))
    return "; ".join(parts)


def failure(result) -> str:
    if result.error:
        return plain(result.error)
    if result.wrong:
        return f"{len(result.wrong)} tensors differ, {result.wrong[0]}"
    return f"revert does not give back {', '.join(result.not_reverted[:3])}"


def plain(text: str) -> str:
    """Text without Markdown syntax."""
    return re.sub(r"([*_<])", r"\\\1", " ".join(text.replace("|", "/").split())[:240])
