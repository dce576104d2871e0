"""A profiler for unchanged training runs: `python -m haiprof run -- COMMAND`, or HAIPROF=1 (docs/haiprof.md)."""
