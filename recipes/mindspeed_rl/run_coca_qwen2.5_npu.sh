#!/usr/bin/env bash
# CoCA for Qwen2.5-1.5B- or 7B-Instruct on four Ascend NPUs of 64 GB, by MindSpeed-RL: README.md.
#   MODEL=7b bash run_coca_qwen2.5_npu.sh [--dry-run | --resume] [KEY=VALUE ...]
set -euo pipefail

MODEL=${MODEL:-7b}
if [[ $MODEL != 1p5b && $MODEL != 7b ]]; then
  echo "MODEL=$MODEL: expected 1p5b or 7b" >&2
  exit 2
fi
NPUS=${NPUS:-4}
OUTPUT=${OUTPUT:-runs/coca_qwen25_${MODEL}_mindspeed_rl}

exec bash "$(dirname "${BASH_SOURCE[0]}")/../../launch/qwen25_${MODEL}_910b.sh" --output "$OUTPUT" \
  hardware.npus_per_node="$NPUS" data.epochs=null trainer.steps=100 checkpoint.interval=50 evaluation.interval=50 "$@"
