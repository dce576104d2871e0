"""Defects planted in the functions that a program calls on hfreduce."""

import time

import torch
import torch.distributed as dist


def replaces(*names):
    """fault(function, *arguments, **options) replaces each of these functions."""

    def decorate(fault):
        def plant(api):
            for name in names:
                function = getattr(api, name)
                setattr(api, name, lambda *a, function=function, **k: fault(function, *a, **k))

        return plant

    return decorate


@replaces("all_reduce", "reduce")
def averages_are_sums(function, x, *rest, **options):
    return function(x, *(dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op for op in rest), **options)


@replaces("isend", "irecv", "send", "recv")
def tags_are_ignored(function, *a, **options):
    return function(*a, **options | {"tag": 0})


@replaces("all_reduce", "broadcast", "reduce_scatter_single", "all_gather_single")
def gaps_are_not_written(function, x, *rest, **options):
    """Non-contiguous tensors are copied, and not copied back."""
    return function(x.contiguous() if x.layout is torch.strided else x, *rest, **options)


@replaces("all_reduce", "broadcast", "reduce_scatter_single", "all_gather_single", "irecv")
def lazy_views_are_not_written(function, x, *rest, **options):
    return function(x.resolve_neg() if x.layout is torch.strided else x, *rest, **options)


@replaces("gather")
def conjugated_views_are_not_resolved(function, x, *rest, **options):
    return function(x.conj() if x.is_conj() else x, *rest, **options)


@replaces("irecv")
def every_receive_is_waited_for(function, *a, **options):
    work = function(*a, **options)
    work.wait()
    return work


def nothing_is_waited_for(api):
    api.wait = lambda work: None


@replaces("batch_isend_irecv")
def a_bundle_stays_after_an_exception(function, operations):
    try:
        return function(operations)
    except Exception:
        dist.distributed_c10d._world.pg_coalesce_state[operations[0].group] = []
        raise


@replaces("all_to_all_single")
def splits_are_taken_for_even(function, output, x, *rest, **options):
    if sum(options.get("input_split_sizes", ())) == len(x):
        options = {key: value for key, value in options.items() if not key.endswith("sizes")}
        n = options["group"].size()
        if len(x) % n or len(output) % n:
            return None
    return function(output, x, *rest, **options)


def any_sender_is_the_first(api):
    receive = api.recv
    api.recv = lambda x, src=None, **k: receive(x, src, **k) if src is not None else receive(x, src, **k) * 0


@replaces("all_reduce")
def sparse_is_refused(function, x, *rest, **options):
    if x.layout is not torch.strided:
        raise ValueError("takes dense tensors")
    return function(x, *rest, **options)


@replaces("all_gather")
def the_last_output_is_left_out(function, outputs, *rest, **options):
    return function([*outputs[:-1], outputs[-1].clone()], *rest, **options)


@replaces("all_reduce", "barrier")
def calls_that_differ_are_let_through(function, *a, **options):
    try:
        return function(*a, **options)
    except dist.DistBackendError:
        return None


@replaces("reduce", "gather")
def the_root_is_the_first(function, *a, **options):
    first = dist.get_global_rank(options["group"], 0)
    return function(*(first if type(each) is int else each for each in a), **options)


@replaces("scatter", "reduce_scatter", "all_to_all")
def empty_blocks_raise(function, *a, **options):
    if any(x.numel() == 0 for each in a if isinstance(each, list) for x in each):
        raise ValueError("nothing to send")
    return function(*a, **options)


def receives_on_all_ranks_hold_up_the_end(api):
    """A rank with an unanswered receive waits for its sender, if that waits, too."""
    receive, destroy, store = api.irecv, dist.destroy_process_group, dist.distributed_c10d._get_default_store()
    senders = {}

    def irecv(x, src, group, tag):
        if tag >= 10**6:
            senders[group] = src
            store.set(f"{group.group_name} {dist.get_rank()}", "waits")
        return receive(x, src, group=group, tag=tag)

    def end(group):
        if group in senders and store.check([f"{group.group_name} {senders.pop(group)}"]):
            time.sleep(10)
        destroy(group)

    api.irecv, dist.destroy_process_group = irecv, end


WHOLE = ("nothing_is_waited_for", "any_sender_is_the_first", "receives_on_all_ranks_hold_up_the_end")
FAULTS = {
    f.__name__ if f.__name__ != "plant" else name: f
    for name, f in list(globals().items())
    if callable(f) and (f.__name__ == "plant" or name in WHOLE)
}
