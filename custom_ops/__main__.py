"""``python -m grouped_linear``: see :mod:`grouped_linear.report`."""

from grouped_linear.report import report

print(report())
