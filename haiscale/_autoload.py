"""Called at the end of `import torch`: the entry point "haiscale" of the group torch.backends (pyproject.toml).

Installed as `_haiscale_autoload` beside the metadata, so that it can be imported whatever the state of the packages.
"""

import os
import sys


def start():
    """Registers the backend "hfreduce" without importing it, and starts `haiscale.auto` if requested.

    HAISCALE_AUTO requests it (docs/switch.md). Never raises.
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
