"""Triton kernels, installed as `hfnn.kernels`: one file per op, named as its room in `hfnn/ops`.

Import them by that name. As `kernels`, from the repository's root, they would be loaded a second time.
"""
