"""Launching a Triton kernel with less host time; docs/notes/launch.md has the measurements.

At each launch, `kernel[grid](...)` specialises each argument by a separate call, looks up the compiled kernel by the
results, checks the globals that were compiled in, builds a dict for profilers, and reads each tensor's address again.
Here the values that Triton specialises on are read directly from the arguments, and the compiled kernel is passed to
Triton's C launcher for this signature. Triton itself does the first launch of every kind.

`recorded` calls a function of a kernel module and records its launches, so that csrc/autograd/triton.cpp can repeat
them without Python.
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
# The launcher's interface is not stable: with other versions Triton does every launch.
KNOWN = triton.__version__.startswith("3.6.") and RUN.__qualname__ == "JITFunction.run"
TENSORS = Tensor, Parameter
LITERAL, POINTER, FRESH = range(3)  # as in csrc/autograd/triton.cpp
_forms = {}
_recordings = {}  # by thread


class Form:
    """The specialisation of a kernel for arguments with the types of args.

    variants: by key, the compiled function and the launcher with the arguments between the stream and the kernel's own.
    """

    def __init__(self, kernel, args):
        params = kernel.params
        self.variants = {}
        self.kernel = kernel  # kept alive, because its id is in the key of _forms
        self.given = sum(not p.is_constexpr for p in params)  # number of run-time arguments; constants follow
        self.constants = (None,) * (len(params) - self.given)  # the launcher ignores them
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
    """Whether Triton must do every launch: a hook is set, or this version is not known here."""
    return bool(
        JITFunction.run is not RUN or not KNOWN
        or ENTER.calls or EXIT.calls
        or RUNTIME.launch_enter_hook is not ENTER or RUNTIME.launch_exit_hook is not EXIT
        or RUNTIME.debug or COMPILATION.instrumentation_mode
    )  # fmt: skip


def watch():
    """The objects that C++ checks without the GIL: lists that stay empty, dicts that do not grow and types that do not
    change while `watched()` is unchanged; None if it can change although they do not."""
    instances = vars(RUNTIME), vars(COMPILATION)
    names = {"launch_enter_hook", "launch_exit_hook", "debug", "instrumentation_mode"}
    if not names.isdisjoint((*instances[0], *instances[1])):  # an assignment would not be seen
        return None
    return (ENTER.calls, EXIT.calls), instances, (JITFunction, type(RUNTIME), type(COMPILATION))


def launch(kernel, grid: tuple, *args, **options):
    """`kernel[grid](*args, **options)`, for a kernel whose globals do not change and tensors of the current device.

    Arguments that are not constants are positional and come first. If a hook is set (by a profiler or for debugging),
    or if an argument has a type that is not known here, Triton launches.
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
    # One entry per argument; tuples are used only for rare cases.
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
    # Another type if Triton compiles in the background, None if a hook of its compiler refused.
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
    """The launches of one call of a function.

    args: of the function; fresh: the positions of numbers that differ at each call; dry: nothing is launched. launches:
    (function, grid, threads, bytes of shared memory, list of hooks or None, parameters), and a parameter is (LITERAL,
    size, its bits), (POINTER, index of the argument, byte offset from its address), (FRESH, index, size).
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
        """types: Triton's names for the types of the parameters that reach the kernel."""
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
        # A view that the function made. Arguments that share an address share it at each call with the same key.
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
    """Refuses torch operators, which would be lost if only launches are repeated. A view is only an address."""

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
    """The bytes of a fresh number as a parameter."""
    if type(value) is float:
        return int.from_bytes(bytes(ctypes.c_float(value)), "little")
    return value & ((1 << 8 * size) - 1)


def _same(launch, other, args):
    """Whether both are the same launch, except for fresh numbers."""
    (*rest, params), (*other_rest, other_params) = launch, other
    return rest == other_rest and params == [
        (LITERAL, p[2], _bits(args[p[1]], p[2])) if p[0] == FRESH else p for p in other_params
    ]


def recorded(function, args: tuple, fresh: tuple):
    """Call function(*args); returns its launches, as in Recording, or None, why not, and whether to try again.

    A second, dry call with other fresh numbers shows where they are used.
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
