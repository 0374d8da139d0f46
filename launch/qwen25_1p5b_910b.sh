#!/usr/bin/env bash
# Qwen2.5-1.5B-Instruct by CoCA on Big-Math-Verified, as in the paper, on eight Ascend 910B.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
launch qwen25_1p5b_910b "$@"
