"""Logits that are computed only if they are read: the tensor, its product, its graph, and its recorded operations."""

from hfnn.deferred.logits import Deferred, defer

__all__ = ["Deferred", "defer"]
