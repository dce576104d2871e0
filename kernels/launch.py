"""Launching a Triton kernel for less of the host's time; docs/notes/launch.md says how much, and what was measured.

At each launch `kernel[grid](...)` specialises its arguments by a call each, asks for the compiled kernel by all that it
found, checks the globals that were compiled in, builds a dict for profilers and has each tensor asked for its address
again. Here what Triton specialises on is read straight from the arguments, and what it compiled is handed to the
launcher that it wrote, in C, for this signature. The first launch of every kind is Triton's own.
"""

import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

RUNTIME, COMPILATION = knobs.runtime, knobs.compilation
RUN, ENTER, EXIT = JITFunction.run, RUNTIME.launch_enter_hook, RUNTIME.launch_exit_hook
# What the launcher takes is nobody's promise: with other versions every launch is Triton's own.
KNOWN = triton.__version__.startswith("3.6.") and RUN.__qualname__ == "JITFunction.run"
TENSORS = Tensor, Parameter
_forms = {}


class Form:
    """What a kernel is specialised on, if its arguments have the types of args.

    variants: by key, the compiled function and the launcher with the arguments between the stream and the kernel's own.
    """

    def __init__(self, kernel, args):
        params = kernel.params
        self.variants = {}
        self.kernel = kernel  # whose id is in the key of _forms must live
        self.given = sum(not p.is_constexpr for p in params)  # at run time; constants follow
        self.constants = (None,) * (len(params) - self.given)  # the launcher passes over them
        kinds = [type(x) for x in args[: self.given]]
        self.tensors = [i for i, kind in enumerate(kinds) if kind in TENSORS]
        self.descriptors = [i for i, kind in enumerate(kinds) if kind is TensorDescriptor]
        self.integers = [i for i, kind in enumerate(kinds) if kind is int and not params[i].do_not_specialize]
        self.widths = [i for i, kind in enumerate(kinds) if kind is int and params[i].do_not_specialize]
        known = {*TENSORS, TensorDescriptor, int, float, bool, type(None)}
        self.known = (
            len(kinds) == self.given and known.issuperset(kinds) and all(p.is_constexpr for p in params[self.given :])
        )


def launch(kernel, grid: tuple, *args, **options):
    """`kernel[grid](*args, **options)`, for a kernel whose globals do not change and tensors of the current device.

    What is no constant is given by position and comes first. Where someone watches (a profiler's hooks, debugging),
    or an argument is of a type that is not known here, Triton launches.
    """
    if (
        type(kernel) is not JITFunction or JITFunction.run is not RUN or not KNOWN or kernel.pre_run_hooks
        or ENTER.calls or EXIT.calls
        or RUNTIME.launch_enter_hook is not ENTER or RUNTIME.launch_exit_hook is not EXIT
        or RUNTIME.debug or COMPILATION.instrumentation_mode
    ):  # fmt: skip
        kernel[grid](*args, **options)
        return
    kinds = id(kernel), *map(type, args), *options
    form = _forms.get(kinds)
    if form is None:
        form = _forms[kinds] = Form(kernel, args)
    if not form.known:
        kernel[grid](*args, **options)
        return
    active = driver.active
    device = active.get_current_device()
    given = form.given
    key, values = [device, *options.values(), *args[given:]], list(args[:given])
    # One entry for each argument: a tuple for what is rare, and for nothing else.
    for i in form.tensors:
        x = args[i]
        values[i] = address = x.data_ptr()
        key.append((x.dtype,) if address & 15 else x.dtype)
    for i in form.integers:
        x = args[i]
        whole = 2 if x == 1 else x & 15 == 0
        key.append(whole if -(2**31) <= x < 2**31 else (whole, x < 2**63))
    for i in form.widths:
        x = args[i]
        key.append(None if -(2**31) <= x < 2**31 else (x < 2**63,))
    for i in form.descriptors:
        key.append((args[i].base.dtype, *args[i].block_shape))
    key = tuple(key)
    variant = form.variants.get(key)
    if variant is None:
        _remember(form, key, kernel[grid](*args, **options))
        return
    function, run, settings = variant
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    run(x, y, z, active.get_current_stream(device), function, *settings, *values, *form.constants)


def _remember(form, key, compiled):
    # Another type where Triton compiles in the background, None where a hook of its compiler refused.
    if type(compiled) is not CompiledKernel:
        return
    run = compiled.run
    if isinstance(run, CudaLauncher) and not run.global_scratch_size and not run.profile_scratch_size:
        scratch, metadata, hooks = (None, None), None, (None, None)
        settings = run.launch_cooperative_grid, run.launch_pdl, *scratch, compiled.packed_metadata, metadata, *hooks
        form.variants[key] = compiled.function, run.launch, settings
