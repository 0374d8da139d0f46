#!/usr/bin/env bash
# CoCA for Qwen2.5-1.5B- or 7B-Instruct on four Ascend NPUs of 64 GB, by verl with FSDP2 and vLLM-Ascend: README.md.
#   MODEL=7b MODEL_PATH=... TRAIN_FILE=... VAL_FILE=... bash run_coca_qwen2.5_npu.sh [--dry-run] [verl's overrides]
set -euo pipefail

MODEL=${MODEL:-7b}
if [[ $MODEL != 1p5b && $MODEL != 7b ]]; then
  echo "MODEL=$MODEL: expected 1p5b or 7b" >&2
  exit 2
fi
NPUS=${NPUS:-4}
OUTPUT=${OUTPUT:-runs/coca_qwen25_${MODEL}_npu}
export VLLM_ASCEND_ENABLE_NZ=0 # NZ weights are not replaced by an update
export VERL_FILE_LOGGER_PATH=$OUTPUT/metrics.jsonl

overrides=(
  ${MODEL_PATH:+actor_rollout_ref.model.path="$MODEL_PATH"}
  ${TRAIN_FILE:+data.train_files="$TRAIN_FILE"}
  ${VAL_FILE:+data.val_files="$VAL_FILE"}
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
  actor_rollout_ref.rollout.enforce_eager=true # a captured graph keeps the addresses of weights that an update moves
  trainer.n_gpus_per_node="$NPUS"
  trainer.total_training_steps=100
  trainer.save_freq=50
  trainer.test_freq=50
  trainer.resume_mode=auto
  trainer.default_local_dir="$OUTPUT/checkpoints"
  trainer.rollout_data_dir="$OUTPUT/samples"
  trainer.validation_data_dir="$OUTPUT/validation"
)
if [[ ${1:-} == --dry-run ]]; then
  exec python3 -m coca_mindspeed.cli check "coca_qwen25_$MODEL" "${overrides[@]}" "${@:2}"
fi

configs=$(python3 -c 'from coca_mindspeed.config.compose import config_directory; print(config_directory() / "verl")')
mkdir -p "$OUTPUT/logs"
python3 -m verl.trainer.main_ppo --config-dir "$configs" --config-name "coca_qwen25_$MODEL" "${overrides[@]}" "$@" 2>&1 |
  tee "$OUTPUT/logs/$(date +%Y%m%d-%H%M%S).log"
