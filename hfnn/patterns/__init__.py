"""Patterns that `convert` recognises in modules whose classes it does not know, one file per pattern.

A pattern is a function `recognise(module)` that returns a `Match`, a `Refusal` if something hints at the pattern, or
None. proof.py is the engine that clones (probe.py), compares and keeps proofs. subclass.py attaches the forwards of
matched modules, and held.py compares what a proof depends on at each call.
"""
