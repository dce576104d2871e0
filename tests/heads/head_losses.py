"""Losses as people write them, and what else they read of the logits."""

import torch
from einops import rearrange
from head_program import SEQ, VOCABULARY, batches, cross_entropy, program, train
from torch import nn
from torch.nn import functional as F


@program
def loss_in_forward(model):
    return train(model, lambda m, x, y: m(x, y)[1])


@program
def loss_in_the_script(model):
    return train(model, lambda m, x, y: cross_entropy(m(x)[0], y))


@program
def a_criterion(model):
    criterion = nn.CrossEntropyLoss(ignore_index=-1, label_smoothing=0.1)
    return train(model, lambda m, x, y: criterion(m(x)[0].flatten(0, 1), y.flatten()))


@program
def shifted(model):
    return train(model, lambda m, x, y: cross_entropy(m(x)[0][:, :-1].contiguous().float(), y[:, 1:]))


@program
def classes_second(model):
    return train(model, lambda m, x, y: F.cross_entropy(m(x)[0].transpose(1, 2), y, ignore_index=-1))


@program
def classes_second_by_permute(model):
    return train(
        model, lambda m, x, y: F.cross_entropy(m(x)[0].permute(0, 2, 1), y, ignore_index=-1, reduction="sum") / SEQ
    )


@program
def classes_second_by_einops(model):
    return train(model, lambda m, x, y: F.cross_entropy(rearrange(m(x)[0], "b n c -> b c n"), y, ignore_index=-1))


@program
def each_loss(model):
    def loss(m, x, y):
        each = F.cross_entropy(m(x)[0].transpose(-1, -2), y, ignore_index=-1, reduction="none")
        return (each * torch.linspace(0, 1, SEQ)).mean()

    return train(model, loss)


@program
def log_softmax_and_nll(model):
    return train(
        model, lambda m, x, y: F.nll_loss(F.log_softmax(m(x)[0], -1).view(-1, VOCABULARY), y.view(-1), ignore_index=-1)
    )


@program
def log_softmax_method(model):
    return train(
        model, lambda m, x, y: F.nll_loss(m(x)[0].view(-1, VOCABULARY).log_softmax(dim=1), y.view(-1), ignore_index=-1)
    )


@program
def log_probabilities_gathered(model):
    def loss(m, x, y):
        return -m(x)[0].log_softmax(-1).gather(-1, y.clamp(0)[..., None]).mean()

    return train(model, loss)


@program
def soft_cap(model):
    return train(model, lambda m, x, y: cross_entropy(30 * torch.tanh(m(x)[0] / 30), y))


@program
def temperature(model):
    return train(model, lambda m, x, y: cross_entropy(m(x)[0] / 0.7, y))


@program
def accuracy_each_step(model):
    found = []

    def loss(m, x, y):
        logits, loss = m(x, y)
        found.append((logits.argmax(-1) == y).float().mean())
        return loss

    return train(model, loss) + found


@program
def accuracy_after_backward(model):
    found = []
    for x, y in batches():
        logits, loss = model(x, y)
        loss.backward()
        found.append((logits.argmax(-1) == y).float().mean())
    return found


@program
def accuracy_after_step(model):
    found, optimizer = [], torch.optim.SGD(model.parameters(), 0.5)
    for x, y in batches():
        logits, loss = model(x, y)
        loss.backward()
        optimizer.step()
        found += [(logits.argmax(-1) == y).float().mean(), loss.detach()]
    return found


@program
def accuracy_every_third_step(model):
    found = []

    def loss(m, x, y):
        logits, loss = m(x, y)
        if len(found) % 3 == 2:
            found.append(logits.softmax(-1).max(-1).values)
        else:
            found.append(loss.detach())
        return loss

    return train(model, loss) + found


@program
def numpy_and_print(model):
    found = []
    for x, y in batches():
        logits, loss = model(x, y)
        loss.backward()
        found += [torch.from_numpy(logits.detach().numpy().copy()), torch.tensor(logits[0, 0].tolist())]
        assert "tensor" in str(logits) or "Deferred" in str(logits)
    return found


@program
def written_in_place(model):
    def loss(m, x, y):
        logits = m(x)[0]
        logits[..., 3] = -1e4
        return cross_entropy(logits, y)

    return train(model, loss)


@program
def masked_in_place(model):
    def loss(m, x, y):
        logits = m(x)[0]
        logits.masked_fill_(torch.arange(VOCABULARY) > VOCABULARY - 4, -1e4)
        return cross_entropy(logits, y)

    return train(model, loss)


@program
def data_is_written(model):
    def loss(m, x, y):
        logits = m(x)[0]
        logits.data.mul_(0.5)
        return cross_entropy(logits, y)

    return train(model, loss)


@program
def hooks_on_logits(model):
    found = []

    def loss(m, x, y):
        logits, loss = m(x, y)
        logits.register_hook(lambda g: found.append(g.abs().sum()))
        return loss

    return train(model, loss) + found


@program
def retained_gradients(model):
    found = []
    for x, y in batches():
        logits, loss = model(x, y)
        logits.retain_grad()
        loss.backward()
        found.append(logits.grad)
    return found


@program
def gradients_of_logits(model):
    found = []
    for x, y in batches():
        logits, loss = model(x, y)
        found += torch.autograd.grad(loss, [logits, model.lm_head.weight])
    return found


@program
def distillation(model):
    teacher = torch.linspace(-1, 1, VOCABULARY)

    def loss(m, x, y):
        logits = m(x)[0]
        kl = F.kl_div(
            F.log_softmax(logits, -1),
            F.log_softmax(teacher, -1).expand_as(logits),
            log_target=True,
            reduction="batchmean",
        )
        return cross_entropy(logits, y) + 0.1 * kl

    return train(model, loss)


@program
def z_loss(model):
    def loss(m, x, y):
        logits = m(x)[0]
        return cross_entropy(logits, y) + 1e-3 * logits.logsumexp(-1).square().mean()

    return train(model, loss)


@program
def two_losses(model):
    def loss(m, x, y):
        logits = m(x)[0]
        return cross_entropy(logits, y) + 0.5 * cross_entropy(logits[:, ::2], y[:, ::2])

    return train(model, loss)


@program
def entropy_bonus(model):
    def loss(m, x, y):
        logits = m(x)[0]
        entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
        return cross_entropy(logits, y) - 0.01 * entropy

    return train(model, loss)
