"""Launches of Triton kernels by hfnn.kernels.launch; tests/workers/launches.py compares them with Triton's own."""

import gc
import os
import pathlib
import subprocess
import sys
import weakref

import pytest
import torch

pytest.importorskip("triton")
WORKERS = pathlib.Path(__file__).parent / "workers"


def test_launches_are_tritons(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(WORKERS)}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", WORKERS / "launches.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def descriptor(x, rows=64):
    from hfnn.kernels.attention import _descriptor, _Place

    return _descriptor(_Place(x.data_ptr(), x.dtype), x.shape, x.stride(), rows)


WHOLE = torch.empty(1 << 17, dtype=torch.bfloat16)
VIEWS = {
    "contiguous": (WHOLE[: 2 * 4 * 128 * 64].view(2, 4, 128, 64), [32768, 8192, 64, 1]),
    "heads behind tokens": (WHOLE[: 2 * 4 * 128 * 64].view(2, 128, 4, 64).transpose(1, 2), [32768, 64, 256, 1]),
    "odd stride of one head": (WHOLE.as_strided((2, 1, 128, 64), (8192, 7, 64, 1)), [8192, 16, 64, 1]),
    "odd stride": (WHOLE.as_strided((2, 4, 128, 64), (32768, 8196, 64, 1)), None),
    "expanded": (WHOLE[: 2 * 128 * 64].view(2, 1, 128, 64).expand(2, 4, 128, 64), None),
    "misaligned": (WHOLE[4 : 4 + 2 * 4 * 128 * 64].view(2, 4, 128, 64), None),
    "empty": (WHOLE[:0].view(2, 0, 128, 64), None),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_descriptor_or_none(name):
    x, strides = VIEWS[name]
    found = descriptor(x)
    if strides is None:
        assert found is None
    else:
        assert (found.shape, found.strides, found.block_shape) == (list(x.shape), strides, [1, 1, 64, 64])
        assert found.base.data_ptr() == x.data_ptr() and found.base.dtype == x.dtype


def test_descriptors_are_told_apart_and_keep_no_tensor():
    x = torch.empty(2, 4, 128, 64, dtype=torch.bfloat16)
    same = descriptor(x)
    assert descriptor(x) is same
    others = x.half().copy_(x), x[:, :2], x.transpose(0, 1), x.view(torch.float16)
    assert all(descriptor(other) is not same for other in others) and descriptor(x, 128) is not same
    there = weakref.ref(x.untyped_storage())
    del x, others
    gc.collect()
    assert there() is None
