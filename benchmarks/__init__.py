# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: one file a question, each run as ``python -m benchmarks.<name>``."""
