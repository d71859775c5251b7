# SPDX-License-Identifier: Apache-2.0
"""What several test modules use, a module for each subject."""
