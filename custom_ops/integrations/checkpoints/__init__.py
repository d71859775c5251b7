# SPDX-License-Identifier: Apache-2.0
"""Files of transformers models whose experts are in few bits: FP8, and MXFP4."""
