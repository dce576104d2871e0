"""Triton kernels, installed as `hfnn.kernels`; one file per op, named as its room in `hfnn/ops`."""

if __name__ != "hfnn.kernels":
    raise ImportError(f"this folder is installed as `hfnn.kernels` (see pyproject.toml); do not import `{__name__}`")
