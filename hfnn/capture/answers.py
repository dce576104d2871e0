"""Values that a forward queries from its tensors (hfnn/core/ask.py), in a graph: the answers used during recording.

While the graph runs, it copies the queried values to the host, and the host compares them. The host waits only for that
copy, not for the whole forward; meanwhile the GPU computes the rest of the forward.
"""

import torch

ROOM = 63  # numbers that a forward may query


class Other(Exception):
    """A call with other answers. answers: up to the first that differs."""

    def __init__(self, answers: tuple):
        super().__init__(answers)
        self.answers = answers


class Answers:
    """expected: the known answers, a tuple of numbers each; further answers are guessed."""

    def __init__(self, backend, expected: tuple):
        self._backend, self.expected, self._asked = backend, [*expected], 0
        self._host = backend.pinned(ROOM + 1)
        self._seen = self._host.numpy()  # [how many were queried, the numbers]
        self._marks = torch.arange(ROOM + 1, device=backend.device)

    def begin(self) -> None:
        """A forward begins; its queries are counted from the first."""
        self._asked = self._end = 0

    def answer(self, x: torch.Tensor, guess: tuple[int, ...]) -> tuple[int, ...]:
        begin, self._end = self._end, self._end + x.numel()
        if self._end > ROOM:
            raise RuntimeError("it asks for more numbers than a recording has room for")
        if self._asked == len(self.expected):
            self.expected.append(guess)
        given, self._asked = self.expected[self._asked], self._asked + 1
        self._host[1 + begin : 1 + self._end].copy_(x.detach().reshape(-1), non_blocking=True)
        self._host[:1].copy_(self._marks[self._asked : self._asked + 1], non_blocking=True)
        return given

    def __bool__(self) -> bool:
        """Whether anything is queried."""
        return self._asked > 0

    def expect(self) -> None:
        """Before a replay."""
        self._seen[0] = 0

    def check(self) -> None:
        """After the launch of a replay. Raises Other."""
        self._backend.wait(lambda: self._seen[0] == self._asked)
        found, at = [], 1
        for given in self.expected:
            found.append(tuple(map(int, self._seen[at : at + len(given)])))
            at += len(given)
            if found[-1] != given:
                raise Other(tuple(found))
