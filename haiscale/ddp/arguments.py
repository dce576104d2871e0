"""Checks of the arguments of DDP's constructor."""

import torch

from haiscale import checks


def refuse(**arguments):
    for name, (given, why) in arguments.items():
        if given:
            raise ValueError(f"{name} has no meaning here: {why}; leave it out")


def group(process_group, device_mesh):
    if device_mesh is None:
        return checks.group_of(process_group)
    if process_group is not None:
        raise ValueError("process_group and device_mesh were both given: pass one of them")
    if device_mesh.ndim != 1:
        raise ValueError(
            f"device_mesh must have one dimension, that of data parallelism, got {device_mesh}: take mesh['dp'] of it"
        )
    return device_mesh.get_group()


def devices(parameters, device_ids, output_device):
    """As in torch: one-element lists for a module on one GPU, otherwise None."""
    on = {p.device for p in parameters}
    if not device_ids and output_device is None:
        return None, None
    if len(device_ids or ()) != 1 or len(on) > 1 or next(iter(on)).type == "cpu":
        raise ValueError(
            f"device_ids must hold the one GPU that the model is on, or be None, got device_ids={device_ids} and "
            f"output_device={output_device} for a model on {', '.join(sorted(map(str, on)))}"
        )
    (given,) = device_ids
    index = given if isinstance(given, int) else torch.device(given).index
    return [index], index if output_device is None else output_device
