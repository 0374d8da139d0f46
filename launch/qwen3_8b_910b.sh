#!/usr/bin/env bash
# Qwen3-8B, thinking off, by CoCA on Big-Math-Verified, with the paper's settings, on eight Ascend 910B.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
launch qwen3_8b_910b "$@"
