#!/usr/bin/env bash
# Make an environment in which MindSpeed-RL rolls out by the real vLLM that it pins, its build for CPUs:
#   requirements/mindspeed-vllm.sh [DIRECTORY [VLLM]]
# DIRECTORY: .venv-mindspeed-vllm-VLLM unless given.  VLLM: 0.9.1 (the default; MindSpeed-RL 2.3.0) or 0.11.0 (its master).
# PYTHON: a Python 3.11.  x86-64 with AVX-512, libnuma.so.1, 7 GB of disk.  Prints how long each part took.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
vllm=${2:-0.9.1}
directory=${1:-.venv-mindspeed-vllm-$vllm}
requirements=$here/mindspeed-vllm-$vllm.txt
python=${PYTHON:-python3.11}

fail() { echo "mindspeed-vllm.sh: $*" >&2; exit 1; }

[ -f "$requirements" ] || fail "vLLM is 0.9.1 or 0.11.0, found $vllm"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || fail "needs Python 3.11; set PYTHON to one"
[ "$(uname -sm)" = "Linux x86_64" ] || fail "vLLM's build is for Linux on x86-64, found $(uname -sm)"
grep -q avx512f /proc/cpuinfo || fail "vLLM's build needs a processor with AVX-512"
"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
  fail "vLLM needs libnuma.so.1 (Debian: apt-get install libnuma1)"

SECONDS=0
"$python" -m venv "$directory"
# --no-deps: the files are the whole list; left out is what serving needs and a rollout does not.
"$directory/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r "$requirements"
echo "packages: $SECONDS s"
packages=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$directory/bin/python" "$here/mindspeed_vllm_edit.py" "$packages"
# vLLM itself would log an import that fails, and go on without its operators.
"$directory/bin/python" -c 'import sys, torch; torch.ops.load_library(sys.argv[1]); torch.ops._C.rms_norm' \
  "$packages/vllm/_C.abi3.so"
echo "the whole: $SECONDS s, $(du -sh "$directory" | cut -f1)"
