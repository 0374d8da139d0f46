#!/usr/bin/env bash
# Qwen2.5-7B-Instruct by CoCA on TACO, the paper's study on code, on eight Ascend 910C (sixteen dies).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
launch qwen25_7b_taco_910c "$@"
