# SPDX-License-Identifier: Apache-2.0
"""Models of other libraries and plain torch, computed by the ops of this package."""
