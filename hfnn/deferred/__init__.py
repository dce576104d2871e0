"""Logits that are computed only if somebody reads them: the tensor, its product, its graph, and what it records."""

from hfnn.deferred.logits import Deferred, defer

__all__ = ["Deferred", "defer"]
