"""README.md and the reference pages of docs: each Python block runs, after code that defines what it assumes."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.filterwarnings("default")  # transformers' own warnings

MODEL = """
import torch, transformers
import haiscale, hfnn, hfrecord, hfreduce

sizes = {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16, "bos_token_id": None}
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, eos_token_id=None, use_cache=False))
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(64, (2, 16))
batches, steps, steps_to_come = [{"input_ids": ids, "labels": ids}] * 2, 1, 1
"""
STAGES = """
import torch
from torch import nn
from haiscale.pipeline import materialize, on_meta

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.line(x)

model = nn.Sequential(nn.Embedding(32, 8), *(Block() for _ in range(4)), nn.Linear(8, 32))
LlamaForCausalLM, config, rank, stages = lambda config: model, None, 1, 4
batches = [torch.randint(32, (16, 4)) for _ in range(2)]
criterion = lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
"""
SURVIVES = """
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

Net, loss_function, total = lambda: nn.Linear(4, 4), nn.functional.mse_loss, 3
dataset = TensorDataset(torch.randn(100, 4), torch.randn(100, 4))
"""
RECORDS = """
import io
import numpy as np
from PIL import Image

file = io.BytesIO()
Image.new("RGB", (4, 4)).save(file, "jpeg")
jpeg, boxes = file.getvalue(), np.zeros((2, 4), np.float32)
"""
# By page: the number of ranks, and the code before the page's blocks.
OF_RANKS = {
    "checkpoint": (2, MODEL + "haiscale.init(device='cpu')\nscheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
                   "first, steps, train, asked = 0, 2, lambda step: None, lambda: True\n"),
    "ddp": (2, MODEL),
    "fsdp": (2, "import torch\nfrom torch import nn\nmodel, loss = nn.Linear(4, 4), nn.functional.mse_loss\n"
             "loader = [(torch.randn(2, 4), torch.randn(2, 4))] * 2\n"),
    "hfreduce": (2, "import torch\nimport hfreduce\ngradient = torch.ones(300)\n"),
    "launch": (1, "import haiscale\noptions = None\n"),
    "pipeline": (4, STAGES),
    "survive": (2, SURVIVES),
    "switch": (2, ""),
}  # fmt: skip


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.rest] * (page in ("checkpoint", "ddp"))) for page in OF_RANKS]
)
def test_blocks_run_on_ranks(page, tmp_path):
    ranks, given = OF_RANKS[page]
    found = blocks(ROOT / f"docs/{page}.md")
    assert found
    script = given + "\n".join(found)
    (tmp_path / "train.py").write_text(script.replace(".cuda()", "").replace('"cuda"', '"cpu"'))
    command = [
        sys.executable,
        "-m",
        "haiscale.launch",
        "--nproc",
        str(ranks),
        *["--survive"] * (page == "survive"),
        "train.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


# By page: the code before its first block, or before each block.
ALONE = {
    **dict.fromkeys(
        ("README.md", "docs/plan.md"),
        MODEL + "inputs = (ids,)\nmodel.eval()\nloss = lambda model, ids: model(ids).logits.sum()\n",
    ),
    "docs/compile.md": MODEL,
    "docs/hfrecord.md": (
        RECORDS,
        "with hfrecord.DatasetWriter('train', fields, append=True) as writer:\n"
        "    for _ in range(9):\n"
        "        writer.write({'image': jpeg, 'label': 7, 'boxes': boxes, 'caption': '', 'more': 1})\n",
        "dataset = hfrecord.Dataset('train', lambda record: record['label'])\n",
        "import torch, hfnn\n"
        "with hfrecord.DatasetWriter('out', {'input_ids': 'int32[?]'}) as writer:\n"
        "    for length in range(3, 9):\n"
        "        writer.write({'input_ids': np.arange(length, dtype=np.int32)})\n",
    ),
    "docs/modes.md": MODEL + "Trainer = lambda *args, callbacks: callbacks\n",
}


@pytest.mark.parametrize("page", ALONE)
def test_blocks_run_in_one_process(page, tmp_path, monkeypatch, one_thread):
    """README.md's statements run one by one, because they are alternatives."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    given, names = ALONE[page], {}
    found = [block for block in blocks(ROOT / page) if "haiscale" not in block]  # need ranks; docs/ddp.md has the same
    for number, block in enumerate(found):
        if number == 0 or not isinstance(given, str):
            exec(given if isinstance(given, str) else given[number], names)
        for statement in ast.parse(block).body:
            if page == "README.md":
                exec(given, names)
            exec(compile(ast.Module([statement], []), page, "exec"), names)


def test_no_page_is_left_out():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {str(page.relative_to(ROOT)) for page in pages if blocks(page)}
    run = {*ALONE, *(f"docs/{page}.md" for page in OF_RANKS)}
    assert {page for page in found - run if not page.startswith("docs/tutorials/")} == {"docs/index.md"}  # test_docs.py
