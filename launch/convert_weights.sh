#!/usr/bin/env bash
# Hugging Face weights to Megatron's form for a run's TP and PP, and a run's checkpoint back, by MindSpeed-LLM.
#
#   bash launch/convert_weights.sh hf2mcore RUN [--dry-run] [KEY=VALUE ...]
#   bash launch/convert_weights.sh mcore2hf RUN [--iteration N] [--dry-run] [--output DIR] [KEY=VALUE ...]
#
# hf2mcore reads model.path and writes model.megatron_path.  mcore2hf reads a checkpoint of the run in DIR (default:
# runs/RUN) and writes a Hugging Face directory: the newest into DIR/hf, that of iteration N into DIR/hf-N.  RUN may be
# the path of a YAML file of one's own.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
find_python
ascend_environment
exec "$PYTHON" -m coca_mindspeed.mindspeed.conversion "$@"
