# SPDX-License-Identifier: Apache-2.0
"""``python -m grouped_linear --selftest``: the kernels beside plain torch and the CPU's."""
