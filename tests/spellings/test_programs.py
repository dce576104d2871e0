"""The programs of this folder, converted: values, gradients and strides are stock's, bytes are the target's.

Each other file is a family of patterns. Its PROGRAMS are spellings of them as people write them, and near misses.
"""

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from program import Program

import hfnn
from hfnn.testing import GRADIENTS, OUTPUTS, assert_close


def _programs(path: Path) -> list[Program]:
    spec = importlib.util.spec_from_file_location(f"spelled_{path.stem}", path)  # bench/ and examples/ have such names
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [pytest.param(program, id=f"{path.stem}: {program}") for program in module.PROGRAMS]


FILES = [path for path in sorted(Path(__file__).parent.glob("*.py")) if not path.stem.startswith(("test_", "program"))]
PROGRAMS = [program for path in FILES for program in _programs(path)]


def results(model, inputs):
    """{name: the output, or a gradient}"""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    y = model(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    wanted = {f"gradient of input {i}": x for i, x in enumerate(leaves) if x.requires_grad}
    wanted |= {f"gradient of {name}": p for name, p in model.named_parameters()}
    grads = torch.autograd.grad(y, [*wanted.values()], dy, allow_unused=True)
    return {"output": y.detach(), **dict(zip(wanted, grads, strict=True))}


def kept(model, inputs) -> int:
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    return hfnn.memory.saved_bytes(lambda: model(*leaves)).total


@pytest.mark.parametrize("prefer", ["memory", "auto"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program, prefer, device):
    stock = program.build().to(device)
    inputs = tuple(x.to(device) for x in program.inputs())
    ours, wide = hfnn.convert(copy.deepcopy(stock), prefer=prefer), program.wide(copy.deepcopy(stock))
    became = "; ".join(row.to for row in hfnn.report(ours).swapped)
    assert not program.op or (program.op in became) == (program.target is not None), became

    for training in (False, *[True] * (not program.draws)):
        exact = results(wide.train(training), [x.double() if x.is_floating_point() else x for x in inputs])
        of, mine = results(stock.train(training), inputs), results(ours.train(training), inputs)
        for name, y in of.items():
            assert (mine[name] is None) == (y is None), name
            if y is not None:
                assert mine[name].stride() == y.stride(), name
                assert_close(mine[name], exact[name], y, OUTPUTS if name == "output" else GRADIENTS, name)

    before, after = kept(stock.train(), inputs), kept(ours.train(), inputs)
    assert before == pytest.approx(program.stock, rel=0.02)
    if program.target is None or (program.slow and prefer != "memory" and device == "cpu"):
        assert after <= before
    else:
        assert after == pytest.approx(program.target, rel=program.within)
