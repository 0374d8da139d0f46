# shellcheck shell=bash
# What every launch script does; a script itself only names its run.  docs/ascend.md is the guide.
#
#   launch RUN [--dry-run] [--smoke|--trial|--resume] [--output DIR] [KEY=VALUE ...]   RUN "": the first word typed
#
# Several nodes: the same command on each, with NNODES, NODE_RANK (0 is the head) and MASTER_ADDR set.

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DRY_RUN=false SMOKE=false TRIAL=false RESUME=false OUTPUT="" ITERATION="" # what parse_command_line finds
OVERRIDES=() WORDS=()
ON_EXIT=() # a command that puts something back, whatever ends the script
LOG="" LOG_WRITERS=()
TRAINING_OPTIONS="--dry-run --smoke --trial --resume --output"

fail() {
  printf 'launch: %s\n' "$*" >&2
  exit 1
}

# What was typed cannot be; as the commands of coca-mindspeed do, with code 2.
misuse() {
  printf 'launch: %s\n' "$*" >&2
  exit 2
}

usage() {
  local run=${1:-RUN} word='' explained=''
  if [[ -z $1 ]]; then
    word=' RUN'
    explained='  RUN           the path of a YAML file of your own, or a ready-made run of coca-mindspeed config list
'
  fi
  cat <<EOF
usage: bash ${0}$word [--dry-run] [--smoke | --trial | --resume] [--output DIR] [KEY=VALUE ...]

$explained\
  --dry-run     print the plan and every command, start nothing
  --smoke       two steps of the tiny model on the local engine, on this machine's CPU or GPU: configuration,
                rewards, update and export; MindSpeed-RL, the layout and your data are not run
  --trial       two iterations of this run itself on the NPUs: MindSpeed-RL with your model, data, layout and
                batches, and a checkpoint; no validation
  --resume      go on from the newest checkpoint in DIR
  --output DIR  where the run goes (default: runs/$run; --smoke, --trial: runs/smoke/$run-TIME, runs/trial/$run-TIME)
  KEY=VALUE     change the configuration, e.g. method=coca_stable (what the study of forms supports) or method=joint
                data.epochs=0.5 rollout.prompts=64; of a smoke run everything but its model and its data

exit codes: that of the training; 2 what was typed wrong, 1 what cannot run, 130 and 143 a signal

environment: NNODES, NODE_RANK, MASTER_ADDR, RAY_PORT, CLUSTER_TIMEOUT, PYTHON; MINDSPEED_RL_HOME, MEGATRON_HOME,
MINDSPEED_HOME, MINDSPEED_LLM_HOME; SKIP_DOCTOR=1 starts without asking coca-mindspeed doctor
EOF
}

#   unknown_option OPTION KNOWN ...
unknown_option() {
  local near
  near=$({ find_python && "$PYTHON" -c 'import sys; from coca_mindspeed.errors import did_you_mean
print(did_you_mean(sys.argv[1], sys.argv[2:]))' "$@"; } 2>/dev/null) || near=""
  misuse "unknown option $1$near (--help lists them)"
}

#   parse_command_line USAGE NUMBER OPTIONS WORD ...
#
# Sorts what was typed into the variables above; a directory is meant from where it was typed.  USAGE is what --help
# prints; NUMBER says how many words, into WORDS, the script takes besides its OPTIONS and KEY=VALUE.
parse_command_line() {
  local usage=$1 number=$2 options unknown=""
  read -ra options <<<"$3"
  shift 3
  while (($#)); do
    [[ $1 != -* || " ${options[*]} " == *" $1 "* ]] || unknown=${unknown:-$1}
    case $1 in
      --dry-run) DRY_RUN=true ;;
      --smoke) SMOKE=true ;;
      --trial) TRIAL=true ;;
      --resume) RESUME=true ;;
      --iteration)
        [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || misuse "--iteration needs the number of a checkpoint's iteration"
        # shellcheck disable=SC2034  # read by convert_weights.sh
        ITERATION=$2
        shift
        ;;
      --output)
        (($# > 1)) || misuse "--output needs a directory"
        OUTPUT=$2
        shift
        ;;
      -h | --help)
        printf '%s\n' "$usage"
        exit
        ;;
      -*) ;;
      *=*) OVERRIDES+=("$1") ;;
      *)
        [[ -n $unknown ]] || ((${#WORDS[@]} < number)) || misuse "expected KEY=VALUE, found $1 (--help explains)"
        WORDS+=("$1")
        ;;
    esac
    shift
  done
  [[ -z $unknown ]] || unknown_option "$unknown" "${options[@]}"
  [[ -z $OUTPUT || $OUTPUT == /* ]] || OUTPUT=$PWD/$OUTPUT
  if "$RESUME" && { "$SMOKE" || "$TRIAL"; }; then
    misuse "--smoke and --trial start afresh; they have nothing to resume"
  elif "$SMOKE" && "$TRIAL"; then
    misuse "--smoke (tiny model, local engine) and --trial (the run itself, on NPUs) are two things; choose one"
  fi
}

#   find_run WORD
#
# Sets RUN to a name, or to the absolute path of a YAML file, and NAME to what its output is called.
find_run() {
  RUN=$1 NAME=$(basename "$1" .yaml)
  [[ $1 == *.yaml ]] || return 0
  [[ -f $1 ]] || misuse "$1: no such configuration file"
  RUN=$(cd "$(dirname "$1")" && pwd)/$NAME.yaml
}

#   require_nodes KEY NUMBER
#
# Refuses a configuration for another number of nodes than is started: Ray would wait for the others.
require_nodes() {
  [[ $2 == "$NNODES" ]] ||
    misuse "$1=$2, but NNODES=$NNODES: start with NNODES=$2 NODE_RANK=0 MASTER_ADDR=... on the first node"
}

#   read_nodes KEY
#
# Checks what the environment says of the nodes, with the defaults of a single one; of several, KEY is told how many.
read_nodes() {
  local override nodes
  nodes=$("$PYTHON" -m coca_mindspeed.upstream.nodes) || exit
  read -r NNODES NODE_RANK MASTER_ADDR RAY_PORT CLUSTER_TIMEOUT <<<"$nodes"
  for override in "${OVERRIDES[@]}"; do
    while [[ $override == +* ]]; do override=${override#+}; done
    [[ $override != "$1="* ]] || require_nodes "$1" "${override#*=}"
  done
  ((NNODES == 1)) || OVERRIDES+=("$1=$NNODES")
}

# On both engines: threads 3356 and 5747 of vllm-project/vllm-ascend.
without_nz_weights() {
  [[ ${VLLM_ASCEND_ENABLE_NZ:-0} == 0 ]] || misuse "VLLM_ASCEND_ENABLE_NZ=$VLLM_ASCEND_ENABLE_NZ: must be 0: vLLM-Ascend \
keeps copies of NZ weights that an update does not reach, and rolls out with old weights; unset it, the run sets it"
  export VLLM_ASCEND_ENABLE_NZ=0
}

#   leave_alone KEY[=VALUE] ...
#
# Refuses a KEY=VALUE that was typed for a key that --smoke sets itself.
leave_alone() {
  local setting override
  for override in "${OVERRIDES[@]}"; do
    while [[ $override == +* ]]; do override=${override#+}; done
    for setting in "$@"; do
      [[ $override != "${setting%%=*}="* ]] || misuse "--smoke sets $setting itself; leave $override out"
    done
  done
}

# Run a command, or with --dry-run only show it.
execute() {
  show "$@"
  "$DRY_RUN" || "$@"
}

show() {
  local name=$1
  shift
  [[ $name == coca ]] && name=coca-mindspeed
  printf '+ %q' "$name"
  (($# == 0)) || printf ' %q' "$@"
  printf '\n'
}

find_python() {
  if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x $REPOSITORY/.venv/bin/python ]] && PYTHON=$REPOSITORY/.venv/bin/python
  fi
  command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: no such program"
  if [[ $PYTHON == */* ]]; then
    # ATB's set_env.sh asks whatever python3 is found first which C++ ABI torch was built with.
    local folder
    folder=$(cd "$(dirname "$PYTHON")" && pwd)
    PYTHON=$folder/$(basename "$PYTHON")
    export PATH=$folder:$PATH
  fi
  export PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}
}

coca() {
  "$PYTHON" -m coca_mindspeed.cli "$@"
}

# CANN's and ATB's scripts read variables that may not be set, and run commands that fail on good machines; whether
# they did their work, the doctor says.
source_if_there() {
  local script
  for script in "$@"; do
    if [[ -f $script ]]; then
      echo "+ source $script"
      set -- # they would take our arguments for theirs
      set +u
      # After || nothing in the script ends this one, whatever set -e says.
      # shellcheck disable=SC1090  # where it is depends on the machine
      source "$script" || echo "launch: $script ended with code $?" >&2
      set -u
      return
    fi
  done
}

ascend_environment() {
  local ascend=${ASCEND_INSTALL_PATH:-/usr/local/Ascend} library
  # An environment that is set is meant; beside a new CANN, ascend-toolkit/ can be what is left of an old one.
  [[ -n ${ASCEND_TOOLKIT_HOME:-} ]] || source_if_there "$ascend/cann/set_env.sh" "$ascend/ascend-toolkit/set_env.sh"
  [[ -n ${ATB_HOME_PATH:-} ]] || source_if_there "$ascend/nnal/atb/set_env.sh"

  # Ray's processes give memory back to the system with jemalloc; with glibc's malloc they only grow.
  for library in "/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2" /usr/lib64/libjemalloc.so.2 \
    /usr/local/lib/libjemalloc.so.2; do
    if [[ -f $library && ${LD_PRELOAD:-} != *jemalloc* ]]; then
      export LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}
      break
    fi
  done
  # On aarch64 scikit-learn's OpenMP finds no room in the static TLS block unless it is loaded first.
  if [[ $(uname -m) == aarch64 ]]; then
    library=$("$PYTHON" -c 'from coca_mindspeed.utils.process import find_libgomp_of_scikit_learn as find
print(find() or "")')
    if [[ -n $library && :${LD_PRELOAD:-}: != *:"$library":* ]]; then
      export LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}
    fi
  fi
  # Ray opens hundreds of sockets a worker; where the hard limit is lower, the doctor says so.
  ulimit -n 32768 2>/dev/null || true

  # Variables of Ray's workers (HCCL_*, TASK_QUEUE_ENABLE, ...) are those of MindSpeed-RL's
  # configs/envs/runtime_env.yaml, unless they are exported where the head is started; the driver prints them.
  export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=true # MindSpeed-RL chooses the device itself
  export RAY_DEDUP_LOGS=0 HYDRA_FULL_ERROR=1                   # errors in full, from every rank
}

smoke() {
  local run=$1 output=${OUTPUT:-runs/smoke/$NAME-$(date +%Y%m%d-%H%M%S)}
  # The run's own YAML, scaled down; what is not named here is as in the run.  These make it a smoke run:
  local -a fixed=(model.path=null model.compute_dtype=float32
    data.name=arithmetic data.train=null data.evaluate=null data.grader=exact 'data.grader_options={}'
    data.epochs=null)
  leave_alone "${fixed[@]}"
  local override
  for override in "${OVERRIDES[@]}"; do
    [[ $override != *hardware=host && $override != *.platform=host ]] ||
      misuse "--smoke runs the local engine: to run MindSpeed-RL without an NPU, leave it out and set trainer.steps=2 \
with $override (docs/port.md, Without an NPU)"
  done
  # These are sizes; what is typed comes last, so that it wins.
  run_child coca train "$run" "${fixed[@]}" warm_up.steps=20 data.train_size=200 data.evaluate_size=16 \
    rollout.prompts=8 rollout.group_size=4 rollout.max_prompt_tokens=64 rollout.max_new_tokens=24 \
    trainer.steps=2 trainer.minibatches=1 trainer.threads=1 evaluation.interval=0 checkpoint.interval=0 \
    logging.samples_interval=1 logging.tensorboard=false logging.wandb=null logging.swanlab=null "${OVERRIDES[@]}" \
    --output "$output" --quiet
  "$DRY_RUN" || echo "smoke passed on the local engine: configuration, rewards, update, export; MindSpeed-RL, the \
layout and your data were not run"
}

# Where packets are dropped, the system would go on trying for two minutes.
port_is_open() {
  # shellcheck disable=SC2016  # expanded by the inner bash
  timeout 2 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2" 2>/dev/null
}

# Stop what was started, the newest first; ray start --block takes its own processes with it, and nothing else.
clean_up() {
  local code=$? index
  local -a children
  trap - EXIT
  mapfile -t children <<<"$(jobs -p)" # those that are not waited for yet
  for ((index = ${#children[@]} - 1; index >= 0; index--)); do
    kill -TERM "${children[index]}" 2>/dev/null || true
    wait "${children[index]}" 2>/dev/null || true
  done
  "${ON_EXIT[@]}" || true
  close_log
  exit "$code"
}

clean_up_at_the_end() {
  trap clean_up EXIT
  trap 'exit 129' HUP
  trap 'exit 130' INT
  trap 'exit 143' TERM
}

#   open_log DIR
#
# Writes all that is printed from here on to a file in DIR/logs as well, one for each start and node.
open_log() {
  "$DRY_RUN" && return
  LOG=$1/logs/$(date +%Y%m%d-%H%M%S)-node$NODE_RANK.log
  mkdir -p "$1/logs"
  echo "launch: this output is also written to $LOG"
  clean_up_at_the_end
  export PYTHONUNBUFFERED=1 # Python keeps lines back where it does not write to a terminal
  # A signal to the process group is for the others: what they print at their end is written too.
  exec 3>&1 4>&2 > >(trap '' HUP INT TERM && exec tee -a "$LOG")
  LOG_WRITERS+=("$!")
  exec 2> >(trap '' HUP INT TERM && exec tee -a "$LOG" >&4)
  LOG_WRITERS+=("$!")
}

# Let the log take what is still on its way; a process that outlives this script holds it up for a few seconds only.
close_log() {
  local writer
  [[ -n $LOG ]] || return 0
  exec 1>&3 2>&4
  for writer in "${LOG_WRITERS[@]}"; do
    timeout 5 tail --pid="$writer" -s 0.1 -f /dev/null || true
  done
}

# In the background, so that a signal to this script is acted upon at once.
start_child() {
  clean_up_at_the_end
  # Not the function coca: a signal would reach the shell that it runs in, and not Python.
  [[ $1 == coca ]] && set -- "$PYTHON" -m coca_mindspeed.cli "${@:2}"
  "$@" &
}

# Run a command as a child and return its exit code.
run_child() {
  show "$@"
  "$DRY_RUN" && return
  start_child "$@"
  wait "$!"
}

# Ray on this node, with options of its own, as a child of this script.
start_ray() {
  local role=$1
  shift
  local -a command=("$PYTHON" -m coca_mindspeed.upstream.ray_cluster start "$CLUSTER_TIMEOUT" --block "$@")
  if [[ $role == head ]]; then
    if port_is_open "$MASTER_ADDR" "$RAY_PORT" && ! "$DRY_RUN"; then
      fail "$MASTER_ADDR:$RAY_PORT is taken, by another Ray perhaps; set RAY_PORT to a free port on every node"
    fi
    command+=(--head "--port=$RAY_PORT" "--node-ip-address=$MASTER_ADDR" --include-dashboard=false)
  else
    command+=("--address=$MASTER_ADDR:$RAY_PORT")
  fi
  show "${command[@]}"
  "$DRY_RUN" && return
  echo "launch: starting Ray on this node, for up to $CLUSTER_TIMEOUT seconds"
  start_child "${command[@]}"
}

wait_for_head() {
  local end=$((SECONDS + CLUSTER_TIMEOUT))
  "$DRY_RUN" || echo "launch: waiting for the Ray head at $MASTER_ADDR:$RAY_PORT, for up to $CLUSTER_TIMEOUT seconds"
  until "$DRY_RUN" || port_is_open "$MASTER_ADDR" "$RAY_PORT"; do
    ((SECONDS < end)) || fail "no Ray head at $MASTER_ADDR:$RAY_PORT after $CLUSTER_TIMEOUT seconds"
    sleep 2
  done
}

# Whether the head is gone, or about to go: its processes do not end all at once.
head_is_gone() {
  local end=$((SECONDS + 5))
  while port_is_open "$MASTER_ADDR" "$RAY_PORT"; do
    ((SECONDS < end)) || return 1
    sleep 1
  done
}

# Work for the head until it ends the cluster, with Ray's options for this node.
join_cluster() {
  local code=0
  wait_for_head
  start_ray worker "$@"
  "$DRY_RUN" && return
  wait "$!" || code=$?
  # It ends with 1 when the head does, and when it could not join it.
  if ((code)) && ! head_is_gone; then
    printf 'launch: Ray has ended on this node with code %s, and the head at %s goes on\n' \
      "$code" "$MASTER_ADDR:$RAY_PORT" >&2
    exit "$code"
  fi
  echo "launch: the head has ended the cluster; it has the training's exit code"
}

# The stages of the method that are still to do, each through MindSpeed-RL.
train_stages() {
  local run=$1 output=$2 stages=$3 stage how file
  shift 3
  local -a resume_flag trial_flag=()
  "$TRIAL" && trial_flag=(--trial)
  while read -r stage how; do
    [[ -n $stage ]] || continue
    file=$output/stage$stage/mindspeed_rl.yaml
    resume_flag=()
    [[ $how == resume ]] && resume_flag=(--resume)
    execute mkdir -p "${file%/*}"
    execute coca check "$run" "$@" --output "$output" --stage "$stage" "${resume_flag[@]}" --quiet --write "$file"
    run_child "$PYTHON" -m coca_mindspeed.mindspeed.start.driver "${trial_flag[@]}" "$file"
  done <<<"$stages"
}

launch() {
  local run=$1
  shift
  if [[ -n $run ]]; then
    parse_command_line "$(usage "$run")" 0 "$TRAINING_OPTIONS" "$@"
  else
    parse_command_line "$(usage "")" 1 "$TRAINING_OPTIONS" "$@"
    ((${#WORDS[@]})) || misuse "which RUN? (--help explains)"
  fi
  find_run "${run:-${WORDS[0]}}"
  cd "$REPOSITORY" || exit
  find_python
  if "$SMOKE"; then
    smoke "$RUN"
  elif "$TRIAL"; then
    # Typed overrides win, but for the length in epochs, and for a warm-up, which would not end in two iterations.
    OVERRIDES=(trainer.steps=2 evaluation.interval=0 checkpoint.interval=2 logging.samples_interval=1
      "${OVERRIDES[@]}" data.epochs=null optimizer.warmup_steps=0)
    OUTPUT=${OUTPUT:-$(trial_output)}
    train_on_ascend "$RUN" "$OUTPUT"
    "$DRY_RUN" || ((NODE_RANK)) || echo "trial passed; the time of a run at the speed that was measured:
    coca-mindspeed check $RUN --metrics $OUTPUT/stage0/metrics.jsonl"
  else
    train_on_ascend "$RUN" "${OUTPUT:-runs/$NAME}"
  fi
}

trial_output() {
  printf 'runs/trial/%s-%s' "$NAME" "$(date +%Y%m%d-%H%M%S)"
}

train_on_ascend() {
  local run=$1 output=$2 npus platform nodes plan stages=""
  read_nodes hardware.nodes
  without_nz_weights
  if ((NODE_RANK == 0)); then
    local -a resume_flag=()
    "$RESUME" && resume_flag=(--resume)
    plan=$(mktemp)
    local code=0
    coca check "$run" "${OVERRIDES[@]}" --output "$output" "${resume_flag[@]}" --for-script "$plan" || code=$?
    if ((code)); then
      rm -f "$plan"
      exit "$code"
    fi
    platform=$(sed -n 's/^platform //p' "$plan")
    nodes=$(sed -n 's/^nodes //p' "$plan")
    npus=$(sed -n 's/^npus_per_node //p' "$plan")
    stages=$(sed -n 's/^stage //p' "$plan")
    rm -f "$plan"
    require_nodes hardware.nodes "$nodes"
  else
    coca check "$run" "${OVERRIDES[@]}"
    platform=$(coca config get "$run" hardware.platform "${OVERRIDES[@]}")
    npus=$(coca config get "$run" hardware.npus_per_node "${OVERRIDES[@]}")
  fi

  if ((NODE_RANK == 0)) && [[ -z $stages ]]; then
    echo "launch: every iteration of $output is done"
    return
  fi
  if [[ $platform == host ]]; then
    export COCA_MINDSPEED_CPU_SHIM=tests.support.mindspeed_host # what stands in for NPUs is test support
  else
    ascend_environment
  fi
  echo "+ coca-mindspeed doctor $run ${OVERRIDES[*]}"
  if ! "$DRY_RUN" && [[ -z ${SKIP_DOCTOR:-} ]] && ! coca doctor "$run" "${OVERRIDES[@]}" --output "$output" --only-problems; then
    fail "this machine is not ready for $run (above: what is missing and how to get it).
Without NPUs, try its rewards and update on the local engine, with a tiny model:  bash ${0}${WORDS[*]:+ ${WORDS[*]}} --smoke"
  fi
  open_log "$output"

  local -a of_ray=("--resources={\"NPU\": $npus}")
  # MindSpeed-RL asks for tens of CPUs by name; without an NPU they are only numbers.
  [[ $platform == host ]] && of_ray+=(--num-cpus=64)
  if ((NODE_RANK > 0)); then
    join_cluster "${of_ray[@]}"
    return
  fi
  start_ray head "${of_ray[@]}"
  export RAY_ADDRESS=$MASTER_ADDR:$RAY_PORT
  run_child "$PYTHON" -m coca_mindspeed.upstream.ray_cluster wait "$CLUSTER_TIMEOUT" $((NNODES * npus)) NPU
  train_stages "$run" "$output" "$stages" "${OVERRIDES[@]}"
  "$DRY_RUN" || echo "launch: every iteration of $output is done"
}
