"""A rank of examples/distributed.py that trains several times; see tests/haiscale/test_example.py."""


def chain(local, trainings):
    """trainings: (settings, whether to resume, path of the result), run one after the other in one process group."""
    import distributed
    import torch
    import torch.distributed as dist
    import transformers

    import haiscale

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    haiscale.init(device="cpu", timeout=60)
    for args, resumed, path in trainings:
        distributed.steps(args, resumed, path)
        dist.barrier()
    dist.destroy_process_group()
