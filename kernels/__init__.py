"""Triton kernels, installed as `hfnn.kernels`: one file per op, named after its room in `hfnn/ops`.

Import them by that name. Imported as `kernels` from the repository's root, they would be loaded a second time.
"""
