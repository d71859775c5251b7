# SPDX-License-Identifier: Apache-2.0
"""Commands that tests run, none of which a test waits for without end."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MINUTES = 10  # the slowest, a kernel's compilation by nvcc, takes two


def run(
    command: Sequence[str | Path], *, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` returns, with output as text.

    Raises:
        subprocess.TimeoutExpired: after MINUTES, once the command was killed.
        subprocess.CalledProcessError: if it failed and `check` is True.
    """
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60 * MINUTES, check=check, **options
    )
