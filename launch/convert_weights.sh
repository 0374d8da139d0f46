#!/usr/bin/env bash
# Hugging Face weights to Megatron's form for a run's TP and PP, and a run's checkpoint back, by MindSpeed-LLM.
#
#   bash launch/convert_weights.sh hf2mcore|mcore2hf RUN [--dry-run] [--output DIR] [KEY=VALUE ...]
#
# hf2mcore reads model.path and writes model.megatron_path.  mcore2hf reads the newest checkpoint of the run in DIR
# (default: runs/RUN) and writes a Hugging Face directory, DIR/hf.  RUN may be the path of a YAML file of one's own.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The converter changes the modes of the original model's files, to which it is given links; finish puts them back,
# and this does where finish is not reached.
restore_modes() {
  cd "$REPOSITORY" && "${RESTORE[@]}"
}

convert_weights() {
  local usage="usage: bash $0 hf2mcore|mcore2hf RUN [--dry-run] [--output DIR] [KEY=VALUE ...]" arguments
  parse_command_line "$usage" 2 "$@"
  ((${#WORDS[@]} == 2)) || misuse "$usage"
  if "$SMOKE" || "$RESUME"; then
    misuse "a conversion has neither --smoke nor --resume"
  fi
  local direction=${WORDS[0]} run output
  [[ $direction == hf2mcore || $direction == mcore2hf ]] || misuse "expected hf2mcore or mcore2hf, found $direction"
  find_run "${WORDS[1]}"
  run=$RUN output=${OUTPUT:-runs/$NAME}
  local -a command
  cd "$REPOSITORY"
  find_python
  local -a dry_run=()
  "$DRY_RUN" && dry_run=(--dry-run)
  arguments=$("$PYTHON" -m coca_mindspeed.mindspeed.weights.conversion prepare "$direction" "$run" "${OVERRIDES[@]}" \
    --output "$output" "${dry_run[@]}")
  mapfile -t command <<<"$arguments"
  if "$DRY_RUN"; then
    echo "+ cd ${MINDSPEED_LLM_HOME:-\$MINDSPEED_LLM_HOME}"
  else
    ascend_environment
    cd "$MINDSPEED_LLM_HOME" # the converter finds its own configs/ from there
    export PYTHONPATH=$MINDSPEED_LLM_HOME:$MINDSPEED_HOME:$MEGATRON_HOME:$PYTHONPATH
    export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron refuses TP > 1 without it
    if [[ $direction == mcore2hf ]]; then
      RESTORE=("$PYTHON" -m coca_mindspeed.mindspeed.weights.conversion restore "$direction" "$run" "${OVERRIDES[@]}"
        --output "$output")
      ON_EXIT=(restore_modes)
    fi
  fi
  run_child "$PYTHON" "${command[@]}"
  cd "$REPOSITORY"
  execute "$PYTHON" -m coca_mindspeed.mindspeed.weights.conversion finish "$direction" "$run" "${OVERRIDES[@]}" \
    --output "$output"
  ON_EXIT=()
}

convert_weights "$@"
