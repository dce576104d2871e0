"""What `import torch` calls at its end: the entry point "haiscale" of the group torch.backends (pyproject.toml)."""

import os
import sys


def start():
    """Makes the backend "hfreduce" known, without importing it, and begins `haiscale.auto` where it is asked for.

    HAISCALE_AUTO says so (docs/switch.md). Never raises.
    """
    try:
        dist = sys.modules["torch.distributed"]
        if dist.is_available() and not hasattr(dist.Backend, "HFREDUCE"):
            dist.Backend.register_backend("hfreduce", _create, extended_api=True, devices=["cpu", "cuda"])
        if os.environ.get("HAISCALE_AUTO", "0") not in ("", "0"):
            import haiscale.auto  # noqa: F401  # it begins by itself
    except Exception:
        import logging

        logging.getLogger("haiscale.auto").warning("nothing is switched in this process", exc_info=True)


def _create(options, pg_options=None):
    from hfreduce.backend import create

    return create(options, pg_options)
