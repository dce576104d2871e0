"""The messages of the backend fuzzer's programs."""

import random

import torch
import torch.distributed as dist


def interleaved(items, key, seed):
    """In another order; items with the same key stay in order."""
    random_ = random.Random(seed)
    chains = {}
    for item in items:
        chains.setdefault(key(item), []).append(item)
    chains, mixed = list(chains.values()), []
    while chains:
        chain = random_.choice(chains)
        mixed.append(chain.pop(0))
        if not chain:
            chains.remove(chain)
    return mixed


class Messages:
    """The step "messages": each message is a dict of src, dst (indices in the group), tag, shape and dtype."""

    def do_messages(self):
        getattr(self, self.step["style"])(self.step["messages"])

    def do_unanswered(self):
        """A receive for a message that does not come, posted in advance as for a step that is left out."""
        if self.me in self.step["who"]:
            with self.attempt(f"{self.i} irecv"):
                x, source = torch.zeros(5), self.ranks[self.me - 1]
                self.unanswered = self.api.irecv(x, source, group=self.group, tag=10**6 + self.i)

    def sent(self, at, message):
        return self.laid(self.drawn(message["src"], at, message["shape"], message["dtype"]))

    def mine(self, messages):
        """(number, message, whether it is sent here) of the messages that involve this rank, in its own order."""
        items = [(k, m, m["src"] == self.me) for k, m in enumerate(messages) if self.me in (m["src"], m["dst"])]
        return interleaved(
            items, lambda item: (item[2], item[1]["src"], item[1]["dst"], item[1]["tag"]), self.step["seed"] + self.me
        )

    def tensors(self, messages):
        return [(k, m, here, self.sent(k, m) if here else self.laid(torch.zeros_like(self.sent(k, m))))
                for k, m, here in self.mine(messages)]  # fmt: skip

    def received(self, items):
        for k, _, here, x in sorted(items, key=lambda item: item[0]):
            if not here:
                self.show(f"{self.i} message {k}", x)

    def later_ones(self, messages):
        """isend and irecv, waited for in another order."""
        items, works = self.tensors(messages), []
        with self.attempt(f"{self.i} messages"):
            for _, m, here, x in items:
                call, peer = (self.api.isend, m["dst"]) if here else (self.api.irecv, m["src"])
                works.append(call(x, self.ranks[peer], group=self.group, tag=m["tag"]))
            for work in random.Random(self.step["seed"] - self.me).sample(works, len(works)):
                self.api.wait(work)
            self.received(items)
            self.show(f"{self.i} from", [w._source_rank() for w, item in zip(works, items, strict=True) if not item[2]])

    def batch(self, messages):
        items = self.tensors(messages)
        with self.attempt(f"{self.i} batch"):
            batch = [
                dist.P2POp(
                    dist.isend if here else dist.irecv, x, self.ranks[m["dst" if here else "src"]], self.group, m["tag"]
                )
                for _, m, here, x in items
            ]
            for work in self.api.batch_isend_irecv(batch) if batch else ():
                self.api.wait(work)
            self.received(items)

    def blocking(self, messages):
        """One after another, in the same order on all ranks."""
        for k, m in enumerate(messages):
            if self.me == m["src"]:
                with self.attempt(f"{self.i} send {k}"):
                    self.api.send(self.sent(k, m), self.ranks[m["dst"]], group=self.group, tag=m["tag"])
            elif self.me == m["dst"]:
                with self.attempt(f"{self.i} recv {k}"):
                    x = self.laid(torch.zeros_like(self.sent(k, m)))
                    self.api.recv(x, self.ranks[m["src"]], group=self.group, tag=m["tag"])
                    self.show(f"{self.i} message {k}", x)

    def any_source(self, messages):
        """All to one rank, which receives from any source. Messages of one sender and tag keep their order."""
        to = messages[0]["dst"]
        with self.attempt(f"{self.i} any"):
            if self.me == to:
                found = []
                for k, m in enumerate(messages):
                    x = torch.zeros_like(self.sent(k, m))
                    source = self.api.recv(x, group=self.group, tag=m["tag"])
                    found.append((source, x.tolist()))
                self.show(f"{self.i} any", sorted(found, key=lambda item: item[0]))
            works = [
                self.api.isend(self.sent(k, m), self.ranks[to], group=self.group, tag=m["tag"])
                for k, m in enumerate(messages)
                if m["src"] == self.me
            ]
            for work in works:
                self.api.wait(work)
