"""Loops as people write them: what happens between forward, backward and step, and around the model."""

import copy
import io
import pickle

import torch
from head_program import PROGRAMS, ROWS, SEQ, VOCABULARY, WIDTH, batches, cross_entropy, one_rank, program, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@program
def accumulation(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for n, (x, y) in enumerate(batches(8)):
        (model(x, y)[1] / 2).backward()
        if n % 2:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


@program
def both_graphs_alive(model):
    found = []
    (a, b), (c, d), *_ = batches()
    for _ in range(3):
        first, second = model(a, b)[1], model(c, d)[1]
        (first + second).backward()
        found += [first.detach(), second.detach()]
    return [*found, *(p.grad for p in model.parameters())]


@program
def backward_twice(model):
    for x, y in batches():
        loss = model(x, y)[1]
        loss.backward(retain_graph=True)
        loss.backward()
    return [p.grad for p in model.parameters()]


@program
def gradient_penalty(model):
    for x, y in batches():
        loss = model(x, y)[1]
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(g.square().sum() for g in grads)).backward()
    return [p.grad for p in model.parameters()]


@program
def evaluation_in_between(model):
    found, optimizer = [], torch.optim.SGD(model.parameters(), 0.5)
    for x, y in batches():
        model.train()
        model(x, y)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            logits, loss = model(x, y)
        assert type(logits) is torch.Tensor
        found += [logits, loss]
    return found


@program
def generation(model):
    found = train(model, lambda m, x, y: m(x, y)[1])
    x = torch.zeros(ROWS, SEQ, dtype=torch.long)
    for _ in range(3):
        logits = model(x)[0][:, -1] / 0.8
        kept = logits.topk(5).values
        logits[logits < kept[:, -1:]] = -float("inf")
        x = torch.cat([x, logits.softmax(-1).argmax(-1, keepdim=True).clamp(max=VOCABULARY - 9)], 1)
    return [*found, x.float()]


@program
def average_of_weights(model):
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for x, y in batches():
        model(x, y)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.data.lerp_(p.data, 0.1)
    return [average(*next(batches()))[1], *average.parameters()]


def after_a_change(change):
    def run(model):
        found = []
        for x, y in batches():
            loss = model(x, y)[1]
            loss.backward()
            with torch.no_grad():
                change(model)
            found += [loss.detach(), model.lm_head.weight.grad.clone()]
        return found

    return run


PROGRAMS["weights added to by hand"] = after_a_change(
    lambda m: [p.data.add_(p.grad, alpha=-0.1) for p in m.parameters()]
)
PROGRAMS["weights added to together"] = after_a_change(
    lambda m: torch._foreach_add_(list(m.parameters()), [p.grad for p in m.parameters()], alpha=-0.1)
)
PROGRAMS["states loaded"] = after_a_change(lambda m: m.load_state_dict({k: 0.9 * v for k, v in m.state_dict().items()}))
PROGRAMS["weights copied into"] = after_a_change(lambda m: m.lm_head.weight.copy_(m.lm_head.weight * 0.5))


@program
def cast_in_between(model):
    found = []
    for n, (x, y) in enumerate(batches()):
        found.append(model(x, y)[1].detach())
        model.to(torch.float64 if n % 2 == 0 else torch.float32)
    return found


@program
def hidden_states_zeroed(model):
    found = []
    for x, y in batches():
        hidden = model.hidden(x)
        logits = model.lm_head(hidden)
        loss = cross_entropy(logits, y)
        loss.backward()
        hidden.detach().zero_()
        found.append(loss.detach())
    return [*found, *(p.grad for p in model.parameters())]


@program
def head_called_twice(model):
    def loss(m, x, y):
        hidden = m.hidden(x)
        return cross_entropy(m.lm_head(hidden), y) + cross_entropy(m.lm_head(hidden.flip(1)), y)

    return train(model, loss)


@program
def functional_head(model):
    return train(model, lambda m, x, y: cross_entropy(F.linear(m.hidden(x), m.lm_head.weight), y))


@program
def checkpointed(model):
    return train(model, lambda m, x, y: checkpoint(lambda x, y: m(x, y)[1], x, y, use_reentrant=False))


@program
def checkpointed_head(model):
    def loss(m, x, y):
        return cross_entropy(checkpoint(m.lm_head, m.hidden(x), use_reentrant=False), y)

    return train(model, loss)


@program
def checkpointed_reentrant(model):
    def loss(m, x, y):
        return cross_entropy(checkpoint(m.lm_head, m.hidden(x), use_reentrant=True), y)

    return train(model, loss)


@program
def checkpointed_loss(model):
    return train(model, lambda m, x, y: checkpoint(cross_entropy, m(x)[0], y, use_reentrant=False))


@program
def autocast(model):
    def loss(m, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return m(x, y)[1]

    return train(model, loss)


@program
def autocast_loss_outside(model):
    def loss(m, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            logits = m(x)[0]
        return cross_entropy(logits.float(), y)

    return train(model, loss)


@program
def compiled_loss(model):
    compiled = torch.compile(cross_entropy, backend="eager")
    return train(model, lambda m, x, y: compiled(m(x)[0], y))


@program
def compiled_model(model):
    compiled = torch.compile(model, backend="eager")
    return train(model, lambda m, x, y: compiled(x, y)[1])


@program
def hooks_on_the_head(model):
    found = []
    model.lm_head.register_forward_hook(lambda m, args, y: found.append(y.detach().sum()))
    return train(model, lambda m, x, y: m(x, y)[1]) + found


@program
def resized(model):
    found = train(model, lambda m, x, y: m(x, y)[1])
    old, model.lm_head = model.lm_head, nn.Linear(WIDTH, VOCABULARY, bias=False)
    model.lm_head.weight.data.copy_(old.weight.data)
    return found + train(model, lambda m, x, y: m(x, y)[1])


@program
def frozen_body(model):
    for p in model.parameters():
        p.requires_grad_(p is model.lm_head.weight)
    return train(model, lambda m, x, y: m(x, y)[1], torch.optim.SGD([model.lm_head.weight], 0.5))


@program
def frozen_head(model):
    for p in model.lm_head.parameters():
        p.requires_grad_(False)
    return train(model, lambda m, x, y: m(x, y)[1], torch.optim.SGD(model.mlp.parameters(), 0.5))


@program
def saved_and_loaded(model):
    train(model, lambda m, x, y: m(x, y)[1])
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    model = pickle.loads(pickle.dumps(model))
    return train(copy.deepcopy(model), lambda m, x, y: m(x, y)[1])


@program
def logits_saved(model):
    found = []
    for x, y in batches():
        logits, loss = model(x, y)
        loss.backward()
        file = io.BytesIO()
        torch.save({"logits": logits.detach()}, file)
        file.seek(0)
        found.append(torch.load(file, weights_only=False)["logits"])
    return found


@program
def moving_average_of_logits(model):
    average, found = torch.zeros(ROWS, SEQ, VOCABULARY), []
    for x, y in batches():
        logits, loss = model(x, y)
        loss.backward()
        average = 0.9 * average + 0.1 * logits.detach()
        found.append(average)
    return found


@program
def logits_of_all_steps(model):
    kept, optimizer = [], torch.optim.SGD(model.parameters(), 0.5)
    for x, y in batches():
        logits, loss = model(x, y)
        kept.append(logits)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [logits.detach() for logits in kept]


@program
def ddp(model):
    with one_rank():
        return train(nn.parallel.DistributedDataParallel(model), lambda m, x, y: m(x, y)[1])


@program
def ddp_loss_in_the_script(model):
    with one_rank():
        return train(nn.parallel.DistributedDataParallel(model), lambda m, x, y: cross_entropy(m(x)[0], y))


@program
def fsdp(model):
    with one_rank():
        found = train(fully_shard(model), lambda m, x, y: cross_entropy(m(x)[0], y))
        return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in found]


@program
def data_parallel(model):
    return train(nn.DataParallel(model), lambda m, x, y: cross_entropy(m(x)[0], y))


@program
def inference(model):
    with torch.inference_mode():
        return [model(x, y)[0] for x, y in batches()]


@program
def anomaly_mode(model):
    with torch.autograd.set_detect_anomaly(True):
        return train(model, lambda m, x, y: m(x, y)[1])


@program
def bfloat16(model):
    return train(model.to(torch.bfloat16), lambda m, x, y: m(x, y)[1])


@program
def float64(model):
    return train(model.double(), lambda m, x, y: m(x, y)[1])


@program
def an_iteration_is_left_out(model):
    """A forward without a backward, as where a loss is not finite."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), 0.5)
    for n, (x, y) in enumerate(batches(7)):
        loss = model(x, y)[1]
        found.append(loss.item())
        if n % 2:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [torch.tensor(found), *model.parameters()]


@program
def vmapped(model):
    return list(torch.vmap(lambda x: model(x[None])[0][0])(next(batches())[0]))


@program
def functional(model):
    params = dict(model.named_parameters())
    x, y = next(batches())
    grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x, y))[1])(params)
    return list(grads.values())


@program
def ranks_of_targets(model):
    found = []

    def loss(m, x, y):
        logits, loss = m(x, y)
        found.append((logits > logits.gather(-1, y.clamp(0)[..., None])).sum(-1).float())
        return loss

    return train(model, loss) + found
