"""Launching a Triton kernel for less of the host's time; docs/notes/launch.md says how much, and what was measured.

At each launch `kernel[grid](...)` specialises its arguments by a call each, asks for the compiled kernel by all that it
found, checks the globals that were compiled in, builds a dict for profilers and has each tensor asked for its address
again. Here what Triton specialises on is read straight from the arguments, and what it compiled is handed to the
launcher that it wrote, in C, for this signature. The first launch of every kind is Triton's own.

`recorded` calls a function of a module of kernels and says what it launched, so that csrc/autograd/triton.cpp can do
the same without Python.
"""

import ctypes
from threading import get_ident

import triton
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
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
LITERAL, POINTER, FRESH = range(3)  # as in csrc/autograd/triton.cpp
_forms = {}
_recordings = {}  # by thread


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


def watched() -> bool:
    """Whether every launch is Triton's own: someone watches, or this is no version that is known here."""
    return bool(
        JITFunction.run is not RUN or not KNOWN
        or ENTER.calls or EXIT.calls
        or RUNTIME.launch_enter_hook is not ENTER or RUNTIME.launch_exit_hook is not EXIT
        or RUNTIME.debug or COMPILATION.instrumentation_mode
    )  # fmt: skip


def watch():
    """What C++ looks at without the GIL: lists that stay empty, dicts that do not grow and types that do not change
    while `watched()` stays what it is; or None where it can change although they do not."""
    instances = vars(RUNTIME), vars(COMPILATION)
    names = {"launch_enter_hook", "launch_exit_hook", "debug", "instrumentation_mode"}
    if not names.isdisjoint((*instances[0], *instances[1])):  # an assignment would not be seen
        return None
    return (ENTER.calls, EXIT.calls), instances, (JITFunction, type(RUNTIME), type(COMPILATION))


def launch(kernel, grid: tuple, *args, **options):
    """`kernel[grid](*args, **options)`, for a kernel whose globals do not change and tensors of the current device.

    What is no constant is given by position and comes first. Where someone watches (a profiler's hooks, debugging),
    or an argument is of a type that is not known here, Triton launches.
    """
    recording = _recordings.get(get_ident()) if _recordings else None
    if (
        type(kernel) is not JITFunction or JITFunction.run is not RUN or not KNOWN or kernel.pre_run_hooks
        or ENTER.calls or EXIT.calls
        or RUNTIME.launch_enter_hook is not ENTER or RUNTIME.launch_exit_hook is not EXIT
        or RUNTIME.debug or COMPILATION.instrumentation_mode
    ):  # fmt: skip
        if recording is not None:
            recording.refuse("Triton itself has to launch: someone watches, or this version or kernel is not known")
        kernel[grid](*args, **options)
        return
    kinds = id(kernel), *map(type, args), *options
    form = _forms.get(kinds)
    if form is None:
        form = _forms[kinds] = Form(kernel, args)
    if not form.known:
        if recording is not None:
            recording.refuse("Triton itself has to launch: an argument has a type that is not known")
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
        if recording is not None and recording.dry:
            recording.refuse("another kernel for another value of a fresh integer")
        _remember(form, key, kernel[grid](*args, **options))
        if recording is not None:
            _record(recording, form, form.variants.get(key), grid, args)
        return
    if recording is not None:
        _record(recording, form, variant, grid, args)
        if recording.dry:
            return
    function, run, settings, _ = variant
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
        form.variants[key] = compiled.function, run.launch, settings, compiled


class _Refused(Exception):
    pass


class Recording:
    """What one call of a function launches.

    args: of the function; fresh: where among them numbers are that differ at each call; dry: nothing is launched.
    launches: (function, grid, threads, bytes of shared memory, list of hooks or None, parameters), and a parameter is
    (LITERAL, size, its bits), (POINTER, number of the argument, bytes behind its address), (FRESH, number, size).
    """

    def __init__(self, args, fresh, dry):
        self.args, self.dry = args, dry
        self.tensors = [(i, x) for i, x in enumerate(args) if isinstance(x, Tensor)]
        self.fresh = {id(args[i]): i for i in fresh}
        self.launches, self.refusal = [], None

    def refuse(self, why):
        self.refusal = self.refusal or why
        if self.dry:
            raise _Refused

    def add(self, function, grid, threads, shared, types, values, hooks=None):
        """types: Triton's names for those of the parameters that reach the kernel."""
        params = [self._param(kind, value) for kind, value in zip(types, values, strict=True)]
        grid = (*grid, 1, 1)[:3]
        if 0 not in grid and not self.refusal:
            self.launches.append((function, grid, threads, shared, hooks, params))

    def _param(self, kind, value):
        if kind[:1] == "*":
            return self._pointer(value)
        if kind in ("fp32", "f32") and type(value) is float and id(value) in self.fresh:
            return FRESH, self.fresh[id(value)], 4
        if kind in ("fp32", "f32", "fp64") and type(value) in (int, float) and id(value) not in self.fresh:
            number = ctypes.c_double(value) if kind == "fp64" else ctypes.c_float(value)
            size, bits = ctypes.sizeof(number), int.from_bytes(bytes(number), "little")
        elif kind[:1] in ("i", "u") and kind[1:] in ("1", "8", "16", "32", "64") and type(value) in (int, bool):
            size = max(1, int(kind[1:]) // 8)
            if id(value) in self.fresh:
                return FRESH, self.fresh[id(value)], size
            if any(0 <= value - x.untyped_storage().data_ptr() < x.untyped_storage().nbytes() for _, x in self.tensors):
                self.refuse("an integer may be an address")
            bits = value & ((1 << 8 * size) - 1)
        else:
            fresh = "a fresh number" if id(value) in self.fresh else type(value).__name__
            self.refuse(f"a parameter of type {kind} given by {fresh}")
            return None
        return LITERAL, size, bits

    def _pointer(self, x):
        if type(x) not in TENSORS:
            self.refuse(f"a pointer given by {type(x).__name__}")
            return None
        for i, y in self.tensors:
            if x is y:
                return POINTER, i, 0
        # A view that the function made. Whoever shares an address shares it at each call of the same key.
        storage, address = x.untyped_storage()._cdata, x.data_ptr()
        near = [(i, address - y.data_ptr(), y) for i, y in self.tensors if y.untyped_storage()._cdata == storage]
        for i, offset, _ in near:
            if offset == 0:
                return POINTER, i, 0
        within = {
            offset: i for i, offset, y in reversed(near)
            if 0 < offset < (1 + sum((n - 1) * s for n, s in zip(y.shape, y.stride(), strict=True))) * y.element_size()
        }  # fmt: skip
        if len(within) != 1:
            self.refuse("a pointer into none of the arguments, or into several")
            return None
        ((offset, i),) = within.items()
        return POINTER, i, offset


class _Operators(TorchDispatchMode):
    """Operators of torch would be lost where only launches are repeated. A view is nothing but an address."""

    def __init__(self, recording):
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        schema = func._schema
        if schema.is_mutable or not schema.returns or not all(result.alias_info for result in schema.returns):
            self.recording.refuse(f"{func} runs")
        return func(*args, **(kwargs or {}))


def record(function: int, grid: tuple, threads: int, shared: int, types, values):
    """Tell this thread's recording, if there is one, about a launch; returns whether to launch at all."""
    recording = _recordings.get(get_ident())
    if recording is not None:
        recording.add(function, grid, threads, shared, types, values)
    return recording is None or not recording.dry


def _record(recording, form, variant, grid, args):
    if variant is None:
        recording.refuse("Triton's launcher is not known, or the kernel wants scratch memory")
        return
    function, _, (cooperative, pdl, *_), compiled = variant
    warps, clusters, shared = compiled.packed_metadata
    if cooperative or pdl or clusters != 1 or form.descriptors:
        recording.refuse("cooperative, overlapping or clustered programs, or descriptors")
        return
    if any(id(args[i]) in recording.fresh for i in form.integers):
        recording.refuse("the kernel specialises on a fresh integer")
    types, given = list(compiled.src.signature.values()), form.given
    if not all(isinstance(kind, str) for kind in types) or any(kind != "constexpr" for kind in types[given:]):
        recording.refuse("a signature that is not known")
        return
    there = [i for i in range(given) if types[i] != "constexpr"]
    types, values = [types[i] for i in there], [args[i] for i in there]
    recording.add(function, grid, 32 * warps, shared, types, values, form.kernel.pre_run_hooks)


def _call(function, args, fresh, dry):
    before = _recordings.get(get_ident())
    recording = _recordings[get_ident()] = Recording(args, fresh, dry)
    try:
        with _Operators(recording):
            function(*args)
    except _Refused:
        pass
    finally:
        if before is None:
            del _recordings[get_ident()]
        else:
            _recordings[get_ident()] = before
    return recording


def _bits(value, size):
    """Those of a fresh number as a parameter."""
    if type(value) is float:
        return int.from_bytes(bytes(ctypes.c_float(value)), "little")
    return value & ((1 << 8 * size) - 1)


def _same(launch, other, args):
    """Whether both are one launch, but for the fresh numbers that `other` names and `launch` has."""
    (*rest, params), (*other_rest, other_params) = launch, other
    return rest == other_rest and params == [
        (LITERAL, p[2], _bits(args[p[1]], p[2])) if p[0] == FRESH else p for p in other_params
    ]


def recorded(function, args: tuple, fresh: tuple):
    """Call function(*args); returns what it launched, as in Recording, or None, why not, and whether to try again.

    A second call, in which nothing is launched, has others in place of fresh numbers and tells where they go.
    """
    real = _call(function, args, (), dry=False)
    if real.refusal:
        return None, real.refusal, True
    if not fresh:
        return real.launches, "", True
    other = list(args)
    for count, i in enumerate(fresh):
        if type(args[i]) is float:
            other[i] = 0.0123 + 0.0625 * count
            continue
        wide = not -(2**31) <= args[i] < 2**31
        other[i] = (0x5EED000000000001 if wide else 0x5EED0001) + 7919 * count
    dry = _call(function, tuple(other), fresh, dry=True)
    if dry.refusal:
        return None, dry.refusal, False
    if len(real.launches) != len(dry.launches) or not all(
        _same(one, other, args) for one, other in zip(real.launches, dry.launches, strict=True)
    ):
        return None, "what is launched depends on a fresh number", False
    return dry.launches, "", True
