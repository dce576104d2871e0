"""Patterns that `convert` recognises in modules whose classes it does not know, one file per pattern.

A pattern is a function `recognise(module)` that returns a `Match`, a `Refusal` if something hints at the pattern, or
None. proof.py is the engine that clones (probe.py), compares and keeps proofs. subclass.py makes the classes of matched
modules, and drops a match whose proof is no longer valid.
"""
