#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the CUDA compiler ("$@") and fails where ptxas says that it serialised wgmma (C75xx) or
# spilled registers. Both are only remarks to ptxas, and cost a kernel its speed in silence.
# CMakeLists.txt uses it where GROUPED_LINEAR_PTXAS_GATE is set, as .ci/run does.
output=$("$@" 2>&1)
status=$?
[ -z "$output" ] || printf '%s\n' "$output" >&2
if printf '%s\n' "$output" | grep -Eq 'C75[0-9][0-9]|spilled to local memory'; then
  echo "ptxas_gate: see above; kernels of grouped_linear must neither serialise wgmma nor spill" >&2
  exit 1
fi
exit $status
