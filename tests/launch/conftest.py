"""A program that stands in for Python: launch is the real one, but for its Ray and its training."""

import socket
import sys

import pytest


@pytest.fixture
def stand_in(tmp_path):
    """A PYTHON whose Ray, training and converter are a few lines; the rest is the real one."""
    program = tmp_path / "python"
    program.write_text(
        f"""#!/usr/bin/env bash
case "$*" in
  '-m coca_mindspeed.cli launch'*)
    STAND_IN="{tmp_path}" exec "{sys.executable}" -m tests.launch.stand_in "${{@:3}}" ;;
  *'ray_cluster start'*) trap 'trap "" TERM; sleep 0.5; echo stopped >> "{tmp_path}/ray"; exit 0' TERM
    echo "started $*" >> "{tmp_path}/ray"
    [[ ${{RAY_EXIT:-}} ]] && until [[ -f "{tmp_path}/go" ]]; do sleep 0.1; done && exit "$RAY_EXIT"
    while true; do sleep 0.1; done ;;
  *"coca_mindspeed.cli train"* | *convert_ckpt*) echo "$$ $*" > "{tmp_path}/training"; exec sleep 60 ;;
  *verl.trainer.main_ppo*) echo "RAY_ADDRESS=$RAY_ADDRESS $*" > "{tmp_path}/driver"; exit "${{DRIVER_EXIT:-0}}" ;;
  *) exec "{sys.executable}" "$@" ;;
esac
"""
    )
    program.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return tmp_path, {"PYTHON": str(program), "SKIP_DOCTOR": "1", "RAY_PORT": str(port)}
