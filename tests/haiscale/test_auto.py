"""Scripts that know nothing of haiscale, switched over by the environment alone (haiscale/auto.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

SCRIPTS = Path(__file__).parent / "scripts"
WORKER = Path(__file__).parents[1] / "workers" / "switched.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
NAME = "haiscale.auto: "
WRAPPER = "DistributedDataParallel is haiscale's where it takes the model"
LINE = f"2 ranks on 1 host run on hfreduce instead of gloo; {WRAPPER}; "
UNCONVERTED = "models are not converted (HAISCALE_AUTO=convert does)"


def launched(tmp_path, *command, auto=None, **more):
    """What a command of two ranks printed: (losses, lines of haiscale.auto, [operations, bytes] by rank)."""
    env = {name: value for name, value in os.environ.items() if name != "HAISCALE_AUTO"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HAISCALE_BUCKETS": "", "COUNTED": str(tmp_path)}
    env |= {"PYTHONPATH": str(SCRIPTS / "counted"), **({} if auto is None else {"HAISCALE_AUTO": auto}), **more}
    done = subprocess.run(
        [*map(str, command)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=ranks.soon(120)
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    (losses,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    lines = [line.partition(NAME)[2] for line in done.stderr.splitlines() if NAME in line]
    return losses, lines, [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]


@pytest.mark.parametrize("script", ["ddp", "trainer", "accelerated", "fabric"])
def test_scripts(script, tmp_path):
    pytest.importorskip({"trainer": "accelerate", "accelerated": "accelerate", "fabric": "lightning_fabric"}.get(script, "torch"))
    command = [*TORCHRUN, SCRIPTS / f"{script}.py"]
    stock, said, counts = launched(tmp_path, *command)
    assert not said and counts == [[0, 0]] * 2
    switched, said, counts = launched(tmp_path, *command, auto="1")
    assert said == [LINE + UNCONVERTED]
    assert all(operations > 0 and nbytes > 0 for operations, nbytes in counts)
    assert switched == pytest.approx(stock, rel=1e-5) and len(stock) >= 8


def test_off_wins_and_convert_converts(tmp_path):
    """Of a script that imports haiscale.auto itself."""
    script = tmp_path / "own.py"
    script.write_text(f"import haiscale.auto\n{(SCRIPTS / 'ddp.py').read_text()}")
    off, said, counts = launched(tmp_path, *TORCHRUN, script, auto="0")
    assert not said and counts == [[0, 0]] * 2
    on, said, counts = launched(tmp_path, *TORCHRUN, script, auto="convert")
    assert said == [LINE + "what it wraps is converted by hfnn"] and counts[1][1] > 0
    assert on == pytest.approx(off, rel=1e-4)
