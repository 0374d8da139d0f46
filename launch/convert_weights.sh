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

# The converter changes the modes of the original model's files, to which it is given links; finish puts them back,
# and this does where finish is not reached.
restore_modes() {
  cd "$REPOSITORY" && "${RESTORE[@]}"
}

convert_weights() {
  local usage="usage: bash $0 hf2mcore|mcore2hf RUN [--iteration N] [--dry-run] [--output DIR] [KEY=VALUE ...]
  --iteration N   of mcore2hf: the checkpoint of iteration N (default: the newest)" arguments
  parse_command_line "$usage" 2 "--iteration --dry-run --output" "$@"
  ((${#WORDS[@]} == 2)) || misuse "$usage"
  local direction=${WORDS[0]} run output
  [[ $direction == hf2mcore || $direction == mcore2hf ]] || misuse "expected hf2mcore or mcore2hf, found $direction"
  [[ $direction == mcore2hf || -z $ITERATION ]] || misuse "--iteration: is for mcore2hf"
  find_run "${WORDS[1]}"
  run=$RUN output=${OUTPUT:-runs/$NAME}
  local -a command what
  cd "$REPOSITORY"
  find_python
  local -a dry_run=()
  "$DRY_RUN" && dry_run=(--dry-run)
  what=("$direction" "$run" "${OVERRIDES[@]}" --output "$output" ${ITERATION:+--iteration "$ITERATION"})
  arguments=$("$PYTHON" -m coca_mindspeed.mindspeed.conversion prepare "${what[@]}" "${dry_run[@]}")
  mapfile -t command <<<"$arguments"
  if "$DRY_RUN"; then
    echo "+ cd ${MINDSPEED_LLM_HOME:-\$MINDSPEED_LLM_HOME}"
  else
    ascend_environment
    cd "$MINDSPEED_LLM_HOME" # the converter finds its own configs/ from there
    export PYTHONPATH=$MINDSPEED_LLM_HOME:$MINDSPEED_HOME:$MEGATRON_HOME:$PYTHONPATH
    export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron refuses TP > 1 without it
    if [[ $direction == mcore2hf ]]; then
      RESTORE=("$PYTHON" -m coca_mindspeed.mindspeed.conversion restore "${what[@]}")
      ON_EXIT=(restore_modes)
    fi
  fi
  run_child "$PYTHON" "${command[@]}"
  cd "$REPOSITORY"
  execute "$PYTHON" -m coca_mindspeed.mindspeed.conversion finish "${what[@]}"
  ON_EXIT=()
}

convert_weights "$@"
