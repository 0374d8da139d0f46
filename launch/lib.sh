# shellcheck shell=bash
# Set the environment that Python needs at its start; the rest is coca-mindspeed launch.

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export COCA_LAUNCH_SCRIPT=$0

#   launch [RUN] WORD ...      a run on MindSpeed-RL
launch() {
  find_python
  ascend_environment
  start "$@"
}

start() {
  export PYTHONUNBUFFERED=1 # Python keeps lines back where it does not write to a terminal
  exec "$PYTHON" -m coca_mindspeed.cli launch "$@"
}

find_python() {
  if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x $REPOSITORY/.venv/bin/python ]] && PYTHON=$REPOSITORY/.venv/bin/python
  fi
  if ! command -v "$PYTHON" >/dev/null; then
    echo "launch: PYTHON=$PYTHON: no such program" >&2
    exit 1
  fi
  if [[ $PYTHON == */* ]]; then
    # ATB's set_env.sh asks whatever python3 is found first which C++ ABI torch was built with.
    local folder
    folder=$(cd "$(dirname "$PYTHON")" && pwd)
    PYTHON=$folder/$(basename "$PYTHON")
    export PATH=$folder:$PATH
  fi
  export PYTHON PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}
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
  # configs/envs/runtime_env.yaml, unless they are exported where the head is started; the run prints them.
  export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=true # MindSpeed-RL chooses the device itself
  export RAY_DEDUP_LOGS=0 HYDRA_FULL_ERROR=1                   # errors in full, from every rank
  # For hardware=host: test support stands in for NPUs.
  export COCA_MINDSPEED_CPU_SHIM=tests.support.mindspeed_host
}
