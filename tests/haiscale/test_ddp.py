"""haiscale.ddp against torch's DistributedDataParallel, bit by bit, on CPU ranks; and its own messages and features.

The rank programs are in tests/workers/ddp.py. All cases with one number of ranks run in one set of processes; the tests
here check what they returned. Both wrappers run on hfreduce, whose sums have a fixed order. Faults are in
tests/workers/ddp_faults.py.
"""

import fcntl
import json
import os
import signal
from pathlib import Path

import pytest
import ranks
import torch

from haiscale.ddp import sizes

WORKER = Path(__file__).parents[1] / "workers" / "ddp.py"
FAULTS = WORKER.with_name("ddp_faults.py")
TRAINING = {  # bitwise like torch's wrapper: [function, arguments]
    "gpt2": ["language", {"make": "gpt2", "converted": False}],
    "gpt2_converted": ["language", {"make": "gpt2", "converted": True}],
    "llama": ["language", {"make": "llama", "converted": False}],
    "llama_converted": ["language", {"make": "llama", "converted": True}],
    "captured": ["captured", {}],
    "batch_norm": ["vision", {"norm": "batch"}],
    "sync_batch_norm": ["vision", {"norm": "sync"}],
    "frozen": ["frozen", {}],
    "unused_in_turns": ["unused", {"choose": "alternating"}],
    "unused_by_rank": ["unused", {"choose": "by_rank"}],
    "unused_but_on_one_rank": ["unused", {"choose": "first_rank_only"}],
    "static": ["static", {}],
    "accumulation": ["accumulation", {"no_sync": True}],
    "accumulation_with_sync": ["accumulation", {"no_sync": False}],
    "nested_no_sync": ["nested_no_sync", {}],
    "checkpoint": ["checkpointed", {"reentrant": False, "shared": True}],
    "reentrant_checkpoint": ["checkpointed", {"reentrant": True, "shared": False}],
    "reentrant_checkpoints_of_one_layer": ["checkpointed", {"reentrant": True, "shared": True}],
    "wire_dtype": ["wire", {}],
    "cpu_assisted": ["assisted", {}],
    "join": ["joined", {"initial": True}],
    "join_by_live_ranks": ["joined", {"initial": False}],
    "overlap_forward": ["overlapped", {"make": "mlp"}],
    "overlap_forward_attention": ["overlapped", {"make": "attention"}],
    "overlap_forward_tied": ["overlapped", {"make": "gpt2"}],
    "overlap_forward_float8": ["overlapped", {"make": "attention", "wire": "float8_e4m3fn"}],
}
OTHERS = {
    "mixed_float32": ["mixed", {"reduce": "float32"}],
    "mixed_bfloat16": ["mixed", {"reduce": "bfloat16"}],
    **{
        name: [name, {}]
        for name in (
            "hooks", "buffers", "compiled", "copies", "again", "pointers", "backwards", "recomputed", "tuned",
            "messages", "shards", "moved", "groups",
        )
    },
}  # fmt: skip
FOUR = {
    name: TRAINING[name]
    for name in ("sync_batch_norm", "unused_by_rank", "static", "accumulation", "join", "join_by_live_ranks")
}


LOST = {  # how and where the second of two ranks ends or stops itself
    "killed_between": ["between", signal.SIGKILL],
    "killed_forward": ["forward", signal.SIGKILL],
    "killed_backward": ["backward", signal.SIGKILL],
    "stopped_forward": ["forward", signal.SIGSTOP],
    "stopped_backward": ["backward", signal.SIGSTOP],
    "killed_backward_float8": ["backward", signal.SIGKILL, "float8_e4m3fn"],
    "stopped_backward_float8": ["backward", signal.SIGSTOP, "float8_e4m3fn"],
}


def run(worker, cases, size, folder, **options):
    return ranks.run(worker, "run", size, folder, cases=cases, timeout=150, **options)


def once(factory, name, worker, cases, size):
    """`run`, by the first of pytest's workers that needs it; the others wait for its result."""
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    results = root / f"{name}.json"
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            results.write_text(json.dumps(run(worker, cases, size, root / name)))
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return once(tmp_path_factory, "ddp", WORKER, TRAINING | OTHERS, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return once(tmp_path_factory, "ddp_four", WORKER, FOUR, 4)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return once(tmp_path_factory, "ddp_faults", FAULTS, LOST, 2)


def of(found, name):
    """What the ranks returned for a case, if none failed."""
    errors = [f"rank {rank}: {result[name]['error']}" for rank, result in enumerate(found) if "error" in result[name]]
    assert not errors, "\n".join(errors)
    return [result[name] for result in found]


def check_training(results):
    for result in results:
        assert result["same"], result
        for name in ("copied", "no_sync", "own"):
            assert result.get(name, True), (name, result)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["nccl", "hfreduce"])
def test_captured_on_two_gpus(backend, tmp_path):
    options = {"gpus": True, "env": lambda rank: {"DDP_DEVICE": f"cuda:{rank}"}, "backend": backend}
    check_training(
        [of_rank["captured"] for of_rank in run(WORKER, {"captured": ["captured", {}]}, 2, tmp_path, **options)]
    )


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.slow
def test_training(found, name):
    """Losses, gradients, parameters and buffers equal those of torch's wrapper; several buckets."""
    results = of(found, name)
    check_training(results)
    for result in results:
        assert result.get("buckets", 2) > 1, result
        assert set(result.get("replays", [13])) == {13}, result
        assert result.get("under_way", 2) > 1, result


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.rest
def test_training_on_four(four, name):
    check_training(of(four, name))


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_mixed_precision(found, reduce):
    """Gradients of a bfloat16 model, averaged in `reduce`, accumulated and applied in float32."""
    for result in of(found, f"mixed_{reduce}"):
        assert all(result["equal"]), result
        assert result["dtypes"] == ["torch.float32", "torch.bfloat16", "torch.bfloat16", "torch.int64"]


def test_wire_dtype_leaves_dtypes(found):
    for result in of(found, "wire_dtype"):
        assert result["dtypes"] == ["torch.float32"]


def test_communication_hooks(found):
    """torch's hooks give the same as with torch's wrapper. A hook's own buffer and result replace the gradients."""
    for result in of(found, "hooks"):
        assert result["allreduce_hook"] and result["fp16_compress_hook"]
        assert result["power_far"] == 0 and result["errors_True"] == result["errors_False"] == 1, result
        indices, last, gradients, parameters = zip(*result["seen"], strict=True)
        assert indices == tuple(range(len(indices))) and len(indices) > 1
        assert last == (False,) * (len(last) - 1) + (True,)
        assert gradients == parameters and sum(gradients) == 8
        assert result["threes"]


def test_buffers_are_broadcast_before_each_forward(found):
    for result in of(found, "buffers"):
        assert result == {"restored": True, "sent": 3, "silent": 0}


def test_compiled(found):
    """torch's compiler splits the graph at buckets, as for torch's wrapper."""
    for result in of(found, "compiled"):
        assert result == {"around": True, "inside": True, "graphs": 2}


def test_copies(found):
    for result in of(found, "copies"):
        assert result["deepcopy"] and result["pickle"]
        assert "default process group" in result["other_group"]


def test_wrapped_again(found):
    for result in of(found, "again"):
        assert result == {"silent": 0, "stopped": 0}


def test_gradients_stay_where_they_are(found):
    for result in of(found, "pointers"):
        assert result["stable"] and result["inside"]
        assert len(result["counts"]) == 2, "sizes were to change between steps"


@pytest.mark.parametrize("name", ["backwards", "recomputed"])
def test_several_backwards_or_forwards(found, name):
    for result in of(found, name):
        assert result["equal"]


def test_the_default_size_stays_unless_another_is_clearly_faster():
    small, default = sizes.CANDIDATES[0], sizes.DEFAULT
    assert sizes._best({small: [1.0, 1.0, 1.1], default: [1.0, 1.2, 1.3]}) == default
    assert sizes._best({small: [1.0, 1.0, 1.1], default: [1.1, 1.2, 1.3]}) == small
    assert sizes._best({small: [1.0], 2 * small: [0.9]}) == 2 * small  # for a model that is smaller than the default


def test_sizes_are_measured_and_kept(found):
    chosen = {result["chosen"] for result in of(found, "tuned")}
    assert len(chosen) == 1
    for result in of(found, "tuned"):
        assert result["same"] and result["steps"] == 20
        assert result["timed"] == [1 << 10, 4 << 10, 16 << 10]
        assert {result["kept"], result["again"]} == chosen
        assert "measured in 15 steps" in result["text"] and "ms a step" in result["text"]
        assert "measured on 20" in result["again_text"]


def test_shards(found):
    for result in of(found, "shards"):
        assert result == {"live": True, "names": True, "kept": True}


def test_ranks_begin_alike(found):
    for result in of(found, "moved"):
        assert result == {"same": True, "variance": 1.0}


def test_groups(found):
    for result in of(found, "groups"):
        assert result == {"averaged": True, "left_out": True}


MESSAGES = {
    "unused": ["6 of 10 parameters", "branches.1.0.weight (of a Linear)", "never.bias", "find_unused_parameters=True"],
    "more": ["shared.", "number 2 of this step", "use_reentrant=False"],
    "more_after": (ENDED := ["the last backward ended in an exception", "zero_grad()"]),
    "raised": ENDED,
    "raised_late": ENDED,
    "unfrozen": ["0.weight (of a Linear)", "wrap the model again"],
    "shape": ["rank 1 (host", "weight: (4, 16) float32", "rank 0 (host", "weight: (3, 16) float32"],
    "name": ["rank 1 (host", "nothing more", "parameter 1.weight: (1,) float32"],
    "frozen": ["bias: (2,) float32, frozen", "bias: (2,) float32, trained"],
    "dim": ["dim has no meaning here"],
    "param_to_hook_all_reduce": ["param_to_hook_all_reduce has no meaning here"],
    "bucket_cap_mb_list": ["bucket_cap_mb_list has no meaning here"],
    "device_ids": ["device_ids=[0]", "a model on cpu"],
    "sparse": ["weight (of an Embedding) has sparse gradients"],
    "lazy": ["weight (of a LazyLinear) was not initialised"],
    "meta": ["weight (of a Linear) is on the meta device", "to_empty()"],
    "nothing": ["no parameter of ReLU requires a gradient"],
    "optimizer": ["torch.optim.sgd.SGD", "hfnn.convert(optimizer)"],
    "tied": ["model.transformer.wte.weight = model.lm_head.weight (of an Embedding, a Linear)"],
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(found, name):
    for rank, result in enumerate(of(found, "messages")):
        assert all(part in result[name] for part in MESSAGES[name]), result[name]
        if name == "unused":
            assert result[name].startswith(f"rank {rank} (host"), result[name]


def test_rank_outside_its_group(found):
    message = of(found, "messages")[1]["group"]
    assert message.startswith("rank 1 (host") and "is not in the process group" in message, message


def test_usable_after_an_error(found):
    assert [result["after"] for result in of(found, "messages")] == ["nothing raised"] * 2


def test_without_process_group():
    from haiscale.ddp import DDP

    with pytest.raises(ValueError, match=r"haiscale.init\(\)"):
        DDP(torch.nn.Linear(2, 2))


def test_evaluation_on_one_rank_alone(tmp_path):
    ddp, fsdp = ranks.run(FAULTS, "alone", 2, tmp_path)[0]
    assert "rank 0 (host" in ddp and "a broadcast of buffers" in ddp and "alone, call .module" in ddp, ddp
    assert "was gathering 0 (Linear) of FSDP" in fsdp and "in evaluation too" in fsdp, fsdp


@pytest.mark.parametrize("name", LOST)
@pytest.mark.slow
def test_lost_rank(told, name):
    """The other is told which rank, in time, and again at the next forward.

    Ranks agree on buffers at the start of forward; gradients are averaged in backward.
    """
    survivor, at = told[0][name], told[1][name]
    assert survivor["stage"] == ("forward" if name == "killed_between" else "backward"), survivor
    if name.startswith("killed"):
        assert "rank 1 (" in survivor["text"] and "has died" in survivor["text"], survivor
        assert survivor["at"] - at < 1, survivor
    else:
        assert "Timed out after 2.0 s" in survivor["text"] and "waiting for rank 1 (" in survivor["text"], survivor
        assert survivor["at"] - at < 2 + 1.5, survivor
    assert survivor["again"] and survivor["soon"] < 0.1, survivor


@pytest.mark.slow
def test_on_gloo(tmp_path):
    """A backend without averages; tests/workers/gloo.py describes how its ranks end."""
    ranks.run(WORKER.with_name("ddp_gloo.py"), "main", 2, tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["nccl", "hfreduce"])
def test_on_gpus(backend, tmp_path):
    cases = TRAINING | {"sync_batch_norm": ["vision", {"norm": "torch"}]}
    cases |= {name: OTHERS[name] for name in ("mixed_float32", "mixed_bfloat16", "pointers", "backwards", "tuned")}
    found = run(
        WORKER, cases, 2, tmp_path, backend=backend, gpus=True,
        env=lambda rank: {"DDP_DEVICE": f"cuda:{rank}", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    )  # fmt: skip
    for name in cases:
        for result in of(found, name):
            wrong = [what for what in ("same", "copied", "no_sync", "stable") if not result.get(what, True)]
            equal = result.get("equal", [True])
            assert not wrong and (equal if isinstance(equal, bool) else all(equal)), (name, result)
