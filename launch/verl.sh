#!/usr/bin/env bash
# A run on verl, on CUDA GPUs or Ascend NPUs; docs/verl.md is the guide.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<EOF2
usage: bash ${0} RUN [--dry-run] [--smoke | --trial | --resume] [--output DIR] [KEY=VALUE ...]

  RUN           a configuration in configs/verl (coca_qwen25_7b, ...), or the path of a YAML file of your own
  --dry-run     print the plan and every command, start nothing
  --smoke       two steps of the same method on the tiny model, through the real verl on this machine's CPU
  --trial       two steps of this run itself on the GPUs or NPUs: your model, data and batches, and a checkpoint; no
                validation
  --resume      go on from the newest checkpoint in DIR
  --output DIR  where the run goes (default: runs/RUN; --smoke, --trial: runs/smoke/RUN-TIME, runs/trial/RUN-TIME)
  KEY=VALUE     change the configuration as verl takes it, e.g. coca.method=coca_stable (what the study of forms
                supports) or coca.method.name=joint trainer.n_gpus_per_node=16

Several nodes: the same command on each, with NNODES, NODE_RANK (0 is the head) and MASTER_ADDR set.

exit codes: that of the training; 2 what was typed wrong, 1 what cannot run, 130 and 143 a signal
environment: NNODES, NODE_RANK, MASTER_ADDR, RAY_PORT, CLUSTER_TIMEOUT, PYTHON
EOF2
}

find_verls_python() {
  if [[ -z ${PYTHON:-} && -x $REPOSITORY/.venv-verl/bin/python ]]; then
    PYTHON=$REPOSITORY/.venv-verl/bin/python
  fi
  find_python
}

require_verl() {
  "$DRY_RUN" || "$PYTHON" -c 'import importlib.util; raise SystemExit(importlib.util.find_spec("verl") is None)' ||
    fail "verl is not installed for $PYTHON.
    PYTHON=...                           # verl's own environment, with this package in it: docs/verl.md
    make .venv-verl/.installed           # on this machine's CPU: --smoke, --dry-run"
}

# Hydra's own quotes, so that a path may hold anything but these.
quoted() {
  [[ $2 != *[\'\\]* ]] || misuse "$1: a path with a quote or a backslash, which Hydra's overrides cannot hold"
  printf "%s='%s'" "$1" "$2"
}

# verl's own test for NPUs. Graphs that vLLM-Ascend has captured can keep old weights: docs/verl.md, On Ascend.
eager_on_npus() {
  EAGER=()
  if "$PYTHON" -c 'import importlib.util; raise SystemExit(importlib.util.find_spec("torch_npu") is None)'; then
    EAGER=(actor_rollout_ref.rollout.enforce_eager=true)
  fi
}

main_ppo() {
  local file=$1
  shift
  # A file elsewhere finds ours: `defaults: [coca_qwen25_7b, _self_]`, or verl/coca_qwen25_7b.
  run_child "$PYTHON" -m verl.trainer.main_ppo --config-dir "$(dirname "$file")" --config-name \
    "$(basename "$file" .yaml)" \
    "hydra.searchpath=['file://$REPOSITORY/configs/verl','file://$REPOSITORY/configs']" "$@"
}

smoke_on_cpu() {
  local file=$1 output=$2
  shift 2
  execute mkdir -p "$output"
  execute "$PYTHON" -m tests.support.verl_smoke "$output/tiny" "$file" "$@"
  export VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=tests.support.verl_host GLOO_SOCKET_IFNAME=lo
  export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
  # The run's own file, scaled down; what is typed comes last, so that it wins.
  main_ppo "$file" "$(quoted actor_rollout_ref.model.path "$output/tiny/model")" \
    "$(quoted data.train_files "$output/tiny/train.jsonl")" "$(quoted data.val_files "$output/tiny/val.jsonl")" \
    coca.grader=exact 'coca.grading={}' coca.samples_interval=1 trainer.device=cpu trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 trainer.total_training_steps=2 trainer.test_freq=2 trainer.save_freq=2 trainer.val_before_train=false \
    trainer.total_epochs=2 "trainer.logger=[console,file]" data.train_batch_size=8 data.max_prompt_length=64 \
    data.max_response_length=24 data.dataloader_num_workers=0 reward.num_workers=1 actor_rollout_ref.rollout.name=host \
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.agent.num_workers=1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.use_torch_compile=false \
    actor_rollout_ref.actor.fsdp_config.use_torch_compile=false actor_rollout_ref.actor.fsdp_config.dtype=float32 \
    +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.model.use_remove_padding=false \
    actor_rollout_ref.model.enable_gradient_checkpointing=false \
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa \
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1 ray_kwargs.ray_init.num_cpus=12 \
    +ray_kwargs.ray_init.num_gpus=1 +ray_kwargs.ray_init.object_store_memory=500000000 \
    +ray_kwargs.ray_init.include_dashboard=false "$@"
}

launch_on_verl() {
  parse_command_line "$(usage)" 1 "$TRAINING_OPTIONS" "$@"
  local run=${WORDS[0]:-} output=$OUTPUT
  [[ -n $run ]] || misuse "which RUN? (--help explains; configs/verl holds the ready-made ones)"
  [[ $run == *.yaml ]] || run=$REPOSITORY/configs/verl/$run.yaml
  find_run "$run"
  local file=$RUN name=$NAME
  cd "$REPOSITORY" || exit
  find_verls_python
  if "$SMOKE"; then
    leave_alone actor_rollout_ref.model.path actor_rollout_ref.rollout.name data.train_files data.val_files
    : "${output:=$REPOSITORY/runs/smoke/$name-$(date +%Y%m%d-%H%M%S)}"
    require_verl
    where_it_goes "$output"
    smoke_on_cpu "$file" "$output" "${WHERE[@]}" "${OVERRIDES[@]}"
    return
  fi
  if "$TRIAL"; then
    OVERRIDES=(trainer.total_training_steps=2 trainer.val_before_train=false trainer.test_freq=-1 trainer.save_freq=2
      coca.samples_interval=1 "${OVERRIDES[@]}")
    : "${output:=$REPOSITORY/$(trial_output)}"
  fi
  read_nodes trainer.nnodes
  without_nz_weights
  : "${output:=$REPOSITORY/runs/$name}"
  if ((NODE_RANK > 0)); then
    : # the head knows; other nodes need not see its directory
  elif [[ -f $output/checkpoints/latest_checkpointed_iteration.txt ]]; then
    "$RESUME" || fail "$output holds checkpoints; go on from them with --resume, or choose another --output"
  else
    "$RESUME" && fail "$output/checkpoints: no checkpoint to resume from$(nearby_runs "$output")"
  fi
  coca check "$file" "${OVERRIDES[@]}"
  where_it_goes "$output" # Ray's processes have the environment that Ray was started in
  open_log "$output"
  if ((NODE_RANK > 0)); then
    join_cluster # Ray finds the GPUs or NPUs by itself
    return
  fi
  if ((NNODES > 1)); then
    start_ray head
    wait_for_head
    export RAY_ADDRESS=$MASTER_ADDR:$RAY_PORT
    run_child "$PYTHON" -m coca_mindspeed.upstream.ray_cluster wait "$CLUSTER_TIMEOUT" "$NNODES"
  fi
  eager_on_npus
  main_ppo "$file" "${WHERE[@]}" trainer.resume_mode=auto "${EAGER[@]}" "${OVERRIDES[@]}"
}

# The runs in and beside a directory that holds none.
nearby_runs() {
  local file runs=()
  for file in "$1"/*/checkpoints/latest_checkpointed_iteration.txt \
    "$(dirname "$1")"/*/checkpoints/latest_checkpointed_iteration.txt; do
    [[ -f $file ]] && runs+=("${file%/checkpoints/*}")
  done
  ((${#runs[@]} == 0)) || printf '; runs nearby: %s' "${runs[*]}"
}

# verl's own places, below one directory.
where_it_goes() {
  export VERL_FILE_LOGGER_PATH=$1/metrics.jsonl TENSORBOARD_DIR=$1/tensorboard
  WHERE=("$(quoted trainer.default_local_dir "$1/checkpoints")" "$(quoted trainer.rollout_data_dir "$1/samples")"
    "$(quoted trainer.validation_data_dir "$1/validation")")
}

launch_on_verl "$@"
