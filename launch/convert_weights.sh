#!/usr/bin/env bash
# Hugging Face weights to Megatron's form for a run's TP and PP, and a run's checkpoint back, by MindSpeed-LLM.
#
#   bash launch/convert_weights.sh hf2mcore|mcore2hf RUN [--dry-run] [--output DIR] [KEY=VALUE ...]
#
# hf2mcore reads model.path and writes model.megatron_path.  mcore2hf reads the newest checkpoint of the run in DIR
# (default: runs/RUN) and writes a Hugging Face directory, DIR/hf.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The converter changes the modes of the original model's files, to which it is given links; finish puts them back,
# and this does where finish is not reached.
restore_modes() {
  cd "$REPOSITORY" && "${RESTORE[@]}"
}

convert_weights() {
  (($# >= 2)) || misuse "usage: bash $0 hf2mcore|mcore2hf RUN [--dry-run] [--output DIR] [KEY=VALUE ...]"
  local direction=$1 run=$2 output=runs/$2 arguments
  shift 2
  [[ $direction == hf2mcore || $direction == mcore2hf ]] || misuse "expected hf2mcore or mcore2hf, found $direction"
  local -a overrides=() command
  while (($#)); do
    case $1 in
      --dry-run) DRY_RUN=true ;;
      --output)
        (($# > 1)) || misuse "--output needs a directory"
        output=$2
        shift
        ;;
      *=*) overrides+=("$1") ;;
      *) misuse "expected KEY=VALUE, --dry-run or --output, found $1" ;;
    esac
    shift
  done
  cd "$REPOSITORY"
  find_python
  local -a dry_run=()
  "$DRY_RUN" && dry_run=(--dry-run)
  arguments=$("$PYTHON" -m coca_mindspeed.mindspeed.weights.conversion prepare "$direction" "$run" "${overrides[@]}" \
    --output "$output" "${dry_run[@]}")
  mapfile -t command <<<"$arguments"
  if "$DRY_RUN"; then
    echo "+ cd ${MINDSPEED_LLM_HOME:-\$MINDSPEED_LLM_HOME}"
  else
    ascend_environment
    cd "$MINDSPEED_LLM_HOME" # the converter finds its own configs/ from there
    export PYTHONPATH=$MINDSPEED_LLM_HOME:$MINDSPEED_HOME:$MEGATRON_HOME:$PYTHONPATH
    if [[ $direction == mcore2hf ]]; then
      RESTORE=("$PYTHON" -m coca_mindspeed.mindspeed.weights.conversion restore "$direction" "$run" "${overrides[@]}"
        --output "$output")
      ON_EXIT=(restore_modes)
    fi
  fi
  run_child "$PYTHON" "${command[@]}"
  cd "$REPOSITORY"
  execute "$PYTHON" -m coca_mindspeed.mindspeed.weights.conversion finish "$direction" "$run" "${overrides[@]}" \
    --output "$output"
  ON_EXIT=()
}

convert_weights "$@"
