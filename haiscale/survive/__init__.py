"""Training that goes on after a fault, in the same processes: docs/survive.md.

    def train(run):                                    # called once per generation
        model, optimizer = run.keep(build)             # built once per process; then with the newest state
        replicas = DDP(model)
        batches = run.batches(len(dataset), 64)        # the indices of this rank's share of each global batch
        loader = DataLoader(dataset, batch_sampler=batches)
        for step, (x, y) in zip(run.steps(10_000), loader):
            (loss(replicas(x), y) * batches.weight).backward()
            with run.commit():                         # the state changes here only
                optimizer.step()
            optimizer.zero_grad()

    survive.run(train, least=2)                        # python -m haiscale.launch --survive --nproc 4 train.py

haiscale/coordinator.py, in the launcher, decides who is in a generation.
"""

from haiscale.survive.training import Batches, Run, run

__all__ = ["Batches", "Run", "run"]
