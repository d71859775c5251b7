"""``python -m grouped_linear``: what is installed; with ``--selftest`` a test of the kernels."""

import argparse

from grouped_linear.report import report

parser = argparse.ArgumentParser(prog="python -m grouped_linear", description=__doc__)
parser.add_argument(
    "--selftest",
    action="store_true",
    help="compare the kernels with float64 on the CPU and the GPU, and time GEMMs; about a minute",
)
if parser.parse_args().selftest:
    from grouped_linear.selftest.command import main

    raise SystemExit(main())
print(report())
