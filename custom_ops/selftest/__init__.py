"""``python -m grouped_linear --selftest``: every op against float64, on each device."""
