"""Counts of recipes."""

from hfnn.core.native import extension as native


class _Counter:
    """How often recipes were handed out and rebuilt, for tests and `report`."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.here = [0, 0]  # in Python
        if native is not None:
            native.reset_counts()

    @property
    def taken(self) -> int:
        return self.here[0] + (native.counts()[0] if native is not None else 0)

    @property
    def rebuilt(self) -> int:
        return self.here[1] + (native.counts()[1] if native is not None else 0)


counter = _Counter()
