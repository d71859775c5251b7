#!/bin/sh
# Runs the CUDA compiler ("$@") and fails where ptxas says that it serialised wgmma (C75xx) or spilled
# registers: both are only remarks to it, and cost a kernel its speed in silence.
output=$("$@" 2>&1)
status=$?
[ -z "$output" ] || printf '%s\n' "$output" >&2
if printf '%s\n' "$output" | grep -Eq 'C75[0-9][0-9]|spilled to local memory'; then
  echo "ptxas_gate: see above; a grouped_linear kernel must neither serialise wgmma nor spill" >&2
  exit 1
fi
exit $status
