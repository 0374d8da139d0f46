#!/usr/bin/env bash
# Llama3-8B-Instruct by CoCA on Big-Math-Verified, as in the paper, on eight Ascend 910C (sixteen dies).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
launch llama3_8b_910c "$@"
