"""A profiler of training runs as they are: `python -m haiprof run -- COMMAND`, or HAIPROF=1 (docs/haiprof.md)."""
