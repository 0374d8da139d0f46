#!/usr/bin/env bash
# Qwen2.5-7B-Instruct by CoCA on Big-Math-Verified, as in the paper, on eight Ascend 910C (sixteen dies).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
launch qwen25_7b_910c "$@"
