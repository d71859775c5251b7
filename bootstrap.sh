#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv with the named extras of pyproject.toml and an editable build of this package:
#
#   ./bootstrap.sh build demo
#
# What only the system can bring is checked first. What is up to date is left alone, so a second run
# takes a moment. The variables PYTHON, TORCH, TORCH_INDEX and GROUPED_LINEAR_CUDA_ARCHS are explained
# in the Makefile.
set -euo pipefail
cd "$(dirname "$0")"

readonly VENV=.venv DEFAULT_TORCH="torch==2.13.0" SUPPORTED="Python 3.11, 3.12, 3.13 or 3.14"
PYTHON="${PYTHON:-}" TORCH="${TORCH:-}" TORCH_INDEX="${TORCH_INDEX:-}"

say() { printf 'set-up: %s\n' "$*"; }
die() {
  printf 'set-up: %s\n' "$*" >&2
  exit 1
}

# A step's stamp holds what the step was made from; the step is done while that is unchanged.
is_done() { [[ -f $VENV/$1.stamp && $(<"$VENV/$1.stamp") == "$2" ]]; }
done_with() { printf '%s\n' "$2" >"$VENV/$1.stamp"; }

# -qq keeps pip's errors and drops its advice and its notes on the machine's own settings.
pip() { PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore "$VENV/bin/python" -m pip "$@" -qq; }

is_supported() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
}

# Sets PYTHON to what `python3` is, or else to the newest that is supported.
choose_python() {
  local candidate
  if [[ -n $PYTHON ]]; then
    is_supported "$PYTHON" || die "PYTHON=$PYTHON is not $SUPPORTED: name another"
    return
  fi
  for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
    if is_supported "$candidate"; then
      PYTHON=$candidate
      return
    fi
  done
  die "needs $SUPPORTED: apt install python3, or name one with PYTHON="
}

# check_system GIGABYTES: one line for what is missing, with Debian's name for it.
check_system() {
  local debian free_gb
  debian=$("$PYTHON" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$PYTHON cannot make a virtual environment: apt install $debian-venv"
  # pybind11 reads it, and so does the C++ that torch.compile writes.
  "$PYTHON" -c 'import pathlib, sys, sysconfig
sys.exit(not (pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h").exists())' ||
    die "$PYTHON has no Python.h: apt install $debian-dev"
  printf '#include <concepts>\n' | "${CXX:-g++}" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
    die "needs a C++20 compiler, ${CXX:-g++} is none: apt install g++, or name one with CXX="
  free_gb=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024 / 1024) }')
  ((free_gb >= $1)) || die "needs $1 GB of disk, $PWD has $free_gb GB: free some"
}

# The folders of PYTHON's packages if it has a torch that this package supports, else nothing.
folders_with_torch() {
  "$PYTHON" - 2>/dev/null <<'END' || true
import site, sys, sysconfig
import torch
if (2, 11) <= tuple(int(part) for part in torch.__version__.split(".")[:2]) <= (2, 15):
    paths = sysconfig.get_paths()
    folders = [paths["purelib"], paths["platlib"], *site.getsitepackages()]
    folders.append(site.getusersitepackages())
    print("\n".join(folder for folder in dict.fromkeys(folders) if folder in sys.path))
END
}

make_venv() {
  local choice="${PYTHON:-any} ${TORCH:-any} ${TORCH_INDEX:-any}" folders=""
  if [[ $choice == "any any any" && -f $VENV/venv.stamp ]] || is_done venv "$choice"; then
    return
  fi
  choose_python
  [[ -n $TORCH$TORCH_INDEX ]] || folders=$(folders_with_torch)
  check_system "$([[ -n $folders ]] && echo 1 || echo 4)" # nearly all of it is torch
  say "$("$PYTHON" -V) in $VENV"
  rm -rf "$VENV"
  "$PYTHON" -m venv "$VENV"
  if [[ -n $folders ]]; then
    # A venv made from a venv does not see its parent's packages, so they are put on its path. Its
    # own setuptools, where Python brings one, would hide the parent's newer one.
    pip uninstall -y setuptools
    "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' |
      (read -r own && printf '%s\n' "$folders" >"$own/linked.pth")
    say "torch $("$VENV/bin/python" -c 'import torch; print(torch.__version__)'), which $PYTHON has"
  else
    TORCH=${TORCH:-$DEFAULT_TORCH}
    say "$TORCH, which takes a while"
    pip install --upgrade pip || die "pip found no new pip"
    pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH" || die "pip found no $TORCH"
  fi
  done_with venv "$choice"
}

# The requirements of an extra that are not met, one a line.
missing() {
  "$VENV/bin/python" - "$1" <<'END'
import importlib.metadata, sys, tomllib
from pip._vendor.packaging.requirements import Requirement

def is_met(requirement):
    try:
        return importlib.metadata.version(requirement.name) in requirement.specifier
    except importlib.metadata.PackageNotFoundError:
        return False

with open("pyproject.toml", "rb") as file:
    extra = tomllib.load(file)["project"]["optional-dependencies"][sys.argv[1]]
print("\n".join(wanted for wanted in extra if not is_met(Requirement(wanted))))
END
}

# install_extra NAME: pip runs only for what is missing, so a complete machine needs no network.
install_extra() {
  local list inputs wanted
  inputs=$(cksum <pyproject.toml)
  is_done "extra-$1" "$inputs" && return
  list=$(missing "$1")
  if [[ -n $list ]]; then
    mapfile -t wanted <<<"$list"
    say "${wanted[*]}"
    pip install "${wanted[@]}" || die "pip could not install ${wanted[*]}: is an index in reach?"
  fi
  done_with "extra-$1" "$inputs"
}

# Sets GROUPED_LINEAR_CUDA_ARCHS, unless it is set: to the GPUs at hand, or to the CPU alone where
# there is none that the kernels run on, whatever compilers there are.
choose_architectures() {
  [[ -z ${GROUPED_LINEAR_CUDA_ARCHS:-} ]] || return 0
  local oldest
  oldest=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -n | head -n 1) || true
  export GROUPED_LINEAR_CUDA_ARCHS=OFF
  if awk -v oldest="${oldest:-0}" 'BEGIN { exit !(oldest + 0 >= 8.0) }'; then
    GROUPED_LINEAR_CUDA_ARCHS=native
  fi
}

install_package() {
  local inputs
  choose_architectures
  # Python files are imported from where they are, so neither an edit nor a new one needs anything.
  inputs=$(
    {
      find csrc pyproject.toml -type f -exec cksum {} +
      echo "${GROUPED_LINEAR_PTXAS_GATE:-} $GROUPED_LINEAR_CUDA_ARCHS ${GROUPED_LINEAR_BUILD_PORTABLE:-}"
    } | sort | cksum
  )
  is_done package "$inputs" && return
  say "building grouped_linear, GROUPED_LINEAR_CUDA_ARCHS=$GROUPED_LINEAR_CUDA_ARCHS"
  pip install --no-build-isolation --no-deps -e . ||
    die "the build failed"
  done_with package "$inputs"
}

make_venv
for extra in "$@"; do install_extra "$extra"; done
install_package
