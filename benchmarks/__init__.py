"""The benchmarks: one file a question, each run as ``python -m benchmarks.<name>``."""
