#!/usr/bin/env bash
# A run on verl, on CUDA GPUs or Ascend NPUs; docs/verl.md is the guide.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
if [[ -z ${PYTHON:-} && -x $REPOSITORY/.venv-verl/bin/python ]]; then
  PYTHON=$REPOSITORY/.venv-verl/bin/python
fi
find_python
start "$@"
