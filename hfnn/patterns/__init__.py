"""What `convert` recognises in modules whose classes it does not know, one file per pattern.

A pattern is a function `recognise(module)`, which returns a `Match`, a `Refusal` where something hints at the pattern,
or None. proof.py is the engine that clones (probe.py), compares and keeps proofs; subclass.py makes the classes that
matched modules get, and lets go of a match whose proof holds no more.
"""
