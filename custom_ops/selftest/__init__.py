"""``python -m grouped_linear --selftest``: the kernels against float64, on each device."""
