"""Called at the end of `import torch`: the entry point "haiprof" of the group torch.backends (pyproject.toml).

Installed as `_haiprof_autoload` beside the metadata, so that it can be imported whatever the state of the packages.
"""

import os


def start():
    """Starts the collector (HAIPROF=1), or only opens its socket (HAIPROF=idle). Never raises."""
    if os.environ.get("HAIPROF", "0") in ("", "0"):
        return
    try:
        from haiprof import control

        control.begin(os.environ["HAIPROF"])
    except Exception:
        import logging

        logging.getLogger("haiprof").warning("haiprof does not profile this process", exc_info=True)
