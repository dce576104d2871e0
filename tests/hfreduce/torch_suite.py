"""torch's own tests of backends (torch.testing._internal.distributed.distributed_test) on hfreduce or another backend:

    python tests/hfreduce/torch_suite.py --ranks 2 [--backend gloo] [--only NAME ...]

Each test runs as for gloo; only the default group is made on the backend. Prints the tests that fail. Exits with 1 if
others fail than those in DIFFERENT.
"""

import argparse
import importlib
import logging
import os
import sys
import types
import unittest

import torch
import torch.distributed as dist

import hfreduce  # noqa: F401 (a backend)

DIFFERENT = {  # why: docs/hfreduce.md
    "test_ddp_logging_data_cpu",
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_wait_all_ranks",
}

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--backend", default="hfreduce")
parser.add_argument("--only", nargs="*")
chosen = parser.parse_args()

# Which tests are skipped is decided by the environment when they are imported. expecttest is imported by torch's base
# class, and not used by them.
os.environ |= {
    "BACKEND": "gloo",
    "OMP_NUM_THREADS": "1",
    "WORLD_SIZE": str(chosen.ranks),
}
sys.modules["expecttest"] = types.ModuleType("expecttest")
sys.modules["expecttest"].TestCase = unittest.TestCase
suite = importlib.import_module("torch.testing._internal.distributed.distributed_test")


class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    @classmethod
    def _run(cls, rank, name, *args, **options):
        init = dist.init_process_group
        dist.init_process_group = lambda *a, **k: init(*a, **k | {"backend": chosen.backend})
        if name == "test_get_backend":  # it compares the name
            suite.BACKEND = chosen.backend
        super()._run(rank, name, *args, **options)

    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


def main():
    torch.set_num_threads(1)
    tests = unittest.TestSuite(map(Suite, chosen.only or unittest.TestLoader().getTestCaseNames(Suite)))
    result = unittest.TextTestRunner(stream=sys.stderr, verbosity=2).run(tests)
    failed = {test._testMethodName: text for test, text in result.failures + result.errors}
    for name, text in failed.items():
        print(f"{name}\n{text}")
    ran = f"{result.testsRun - len(result.skipped)} tests on {chosen.ranks} ranks of {chosen.backend}"
    print(f"{ran}, {len(failed)} failed:", *sorted(failed), sep="\n  ")
    return failed.keys() - (DIFFERENT if chosen.backend == "hfreduce" else ())


if __name__ == "__main__":
    logging.disable(logging.INFO)
    sys.exit(bool(main()))
