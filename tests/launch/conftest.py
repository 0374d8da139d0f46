"""A program that stands in for Python: the scripts are tested, and no Python has to start."""

import socket
import sys

import pytest


@pytest.fixture
def stand_in(tmp_path):
    """A PYTHON whose check, Ray, cluster and driver are a few lines of shell; the rest is the real one.

    ``STAGES`` are the stages that ``check`` finds; with ``REAL_CHECK`` it is the real one.
    """
    program = tmp_path / "python"
    program.write_text(
        f"""#!/usr/bin/env bash
[[ ${{REAL_CHECK:-}} ]] || case "$*" in
  *"coca_mindspeed.cli check"*)
    while (($#)); do
      case $1 in
        --for-script) printf '%s\n' "platform npu" "nodes 1" "npus_per_node 8" > "$2"
          printf '%s' "${{STAGES-stage 0 fresh}}" >> "$2" ;;
        --write) touch "$2" ;;
      esac
      shift
    done
    exit ;;
  *"config get"*hardware.platform*) echo npu; exit ;;
  *"config get"*npus_per_node*) echo 8; exit ;;
esac
case "$*" in
  *'ray_cluster start'*) trap 'echo stopped >> "{tmp_path}/ray"; exit 0' TERM
    echo "started $*" >> "{tmp_path}/ray"
    [[ ${{RAY_EXIT:-}} ]] && until [[ -f "{tmp_path}/go" ]]; do sleep 0.1; done && exit "$RAY_EXIT"
    while true; do sleep 0.1; done ;;
  *"coca_mindspeed.cli train"* | *convert_ckpt*) echo "$$ $*" > "{tmp_path}/training"; exec sleep 60 ;;
  *'ray_cluster wait'*)
    until [[ -f "{tmp_path}/ray" ]]; do sleep 0.1; done
    if [[ ${{CLUSTER_SLEEPS:-}} ]]; then echo "$$" > "{tmp_path}/training"; exec sleep 60; fi ;;
  *mindspeed.start.driver*) echo "a line of the training"; echo "a warning of the training" >&2
    echo "$RAY_ADDRESS ${{@: -1}}" >> "{tmp_path}/driver"
    [[ ${{DRIVER_SLEEPS:-}} ]] && exec sleep 60; exit "${{DRIVER_EXIT:-0}}" ;;
  *'find_spec("verl")'*) ;;
  *'find_spec("torch_npu")'*) exit "${{NO_NPU:-0}}" ;;
  *verl.trainer.main_ppo*) echo "$*" > "{tmp_path}/driver"; exit "${{DRIVER_EXIT:-0}}" ;;
  *) exec "{sys.executable}" "$@" ;;
esac
"""
    )
    program.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return tmp_path, {"PYTHON": str(program), "SKIP_DOCTOR": "1", "RAY_PORT": str(port)}
