"""Builds a model by its name, without weights, for `hfnn report MODEL`."""

import importlib.util
from pathlib import Path

import torch
from torch import nn

HEADS = ("CausalLM", "MaskedLM", "Seq2SeqLM", "ImageClassification", "SpeechSeq2Seq", "CTC", "ImageTextToText")


def named(name: str) -> nn.Module:
    """The model in training mode, on the device "meta", where it takes no memory.

    name: a folder with a config.json of transformers, or that file; a model type of transformers ("gpt2"), with the
    default sizes of its config; a model of timm ("resnet50", or "timm:..."); else a name on the Hugging Face hub, from
    which only the config is downloaded. Raises ValueError if it is none of these.
    """
    of_timm = importlib.util.find_spec("timm") is not None and _of_timm(name.removeprefix("timm:"))
    if name.startswith("timm:") and not of_timm:
        raise ValueError(f"timm has no model {name.removeprefix('timm:')!r}, or is not installed")
    if of_timm and not Path(name).exists() and (name.startswith("timm:") or not _is_type(name)):
        with torch.device("meta"):
            return of_timm().train()
    return _of_transformers(_config(name))


def _of_timm(name: str):
    import timm

    return (lambda: timm.create_model(name, pretrained=False)) if timm.is_model(name) else None


def _is_type(name: str) -> bool:
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return False
    return name in CONFIG_MAPPING


def _config(name: str):
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(f"{name!r}: install transformers (or timm, for its models) to build a model by name") from None
    path = Path(name)
    if path.exists():
        folder = path.parent if path.is_file() else path
        if not (folder / "config.json").exists():
            raise ValueError(f"{name}: there is no config.json in {folder}")
        return AutoConfig.from_pretrained(folder)
    if _is_type(name):
        return AutoConfig.for_model(name)
    try:
        return AutoConfig.from_pretrained(name)
    except Exception as error:  # of the hub's client, of several kinds
        raise ValueError(
            f"{name!r} is no folder, no model type of transformers, no model of timm, and the hub gave no config of "
            f"that name: {str(error).splitlines()[0]}"
        ) from None


def _of_transformers(config) -> nn.Module:
    import transformers

    classes = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    with torch.device("meta"):
        for cls in filter(None, classes):
            return cls(config).train()
        for head in HEADS:
            auto = getattr(transformers, f"AutoModelFor{head}", None)
            if auto is not None and type(config) in auto._model_mapping:
                return auto.from_config(config).train()
        return transformers.AutoModel.from_config(config).train()
