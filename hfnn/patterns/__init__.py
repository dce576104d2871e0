"""What `convert` recognises in modules whose classes it does not know, one file per pattern.

A pattern is a function `recognise(module)`, which returns (a match, None), (None, why not) where something hints at the
pattern, or (None, None). A match says how the module is to be read. It has `mixin`, the class that goes before the
module's own; `op`, for the report, or None; `reads`, what its proof depends on (probe.py), if it was proved; and
`str(match)` is what the report calls it.
"""
