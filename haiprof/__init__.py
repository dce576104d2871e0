"""A profiler of training runs that need no change: `python -m haiprof run -- COMMAND`, or HAIPROF=1 (docs/haiprof.md)."""
