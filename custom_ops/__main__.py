# SPDX-License-Identifier: Apache-2.0
"""``python -m grouped_linear``: what is installed; with ``--selftest`` each layer is tried."""

import argparse
import os
import sys

from grouped_linear import __version__
from grouped_linear.report import report

parser = argparse.ArgumentParser(prog="python -m grouped_linear", description=__doc__)
parser.add_argument("--version", action="version", version=__version__)
parser.add_argument(
    "--selftest",
    action="store_true",
    help="run each layer under each recipe, a GPU's beside the CPU's, and the CPU's beside float64",
)


def main() -> int:
    """Run the command: 0, or 1 where the self-test fails."""
    if parser.parse_args().selftest:
        from grouped_linear.selftest import main as selftest

        return selftest()
    print(report(), flush=True)
    return 0


try:
    code = main()
except BrokenPipeError:  # head has seen enough; Python would write the rest at its exit
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    code = 1
raise SystemExit(code)
