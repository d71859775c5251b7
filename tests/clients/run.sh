#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run.sh EXTRA TEST...: makes .venv-EXTRA, which sees all of .venv and has the extra of this name in pyproject.toml
# besides, and runs these tests there. A second run installs nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly EXTRA=$1 VENV=.venv-$1
shift
python=$PWD/$VENV/bin/python

mapfile -t packages < <(.venv/bin/python - "$EXTRA" <<'END'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["optional-dependencies"][sys.argv[1]]))
END
)
stamp="$(.venv/bin/python -V) ${packages[*]}"
if [[ ! -f $VENV/stamp || $(<"$VENV/stamp") != "$stamp" ]]; then
  echo "set-up: ${packages[*]} in $VENV"
  rm -rf "$VENV"
  .venv/bin/python -m venv "$VENV"
  site_of() { "$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
  # addsitedir reads the .pth files there too, which name an editable installation.
  printf "import site; site.addsitedir('%s')\n" "$(site_of .venv/bin/python)" >"$(site_of "$python")/linked.pth"
  PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore "$python" -m pip install -qq "${packages[@]}"
  printf '%s\n' "$stamp" >"$VENV/stamp"
fi
"$python" - "${packages[@]}" <<'END'
import re, sys
from importlib.metadata import version
names = ["torch", "transformers", *(re.split("[=>]", wanted)[0] for wanted in sys.argv[1:])]
print(", ".join(f"{name} {version(name)}" for name in names))
END
exec "$python" -m pytest -p no:cacheprovider "$@"
