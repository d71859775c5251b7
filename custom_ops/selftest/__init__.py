"""``python -m grouped_linear --selftest``: the kernels beside plain torch and the CPU's."""
