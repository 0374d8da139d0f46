"""Start a run on a Ray cluster: its options, signals, log and child processes, and Ray on this node."""

import atexit
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from coca_mindspeed.config.compose import config_directory
from coca_mindspeed.errors import ConfigError, Problem, TrainingError, UsageError
from coca_mindspeed.upstream.claim import CLAIM, Claimant, read_claim
from coca_mindspeed.upstream.machine import Finding, show_findings
from coca_mindspeed.upstream.nodes import Nodes
from coca_mindspeed.upstream.ray_cluster import set_ray_defaults, wait_for_cluster
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.process import InterruptedRunError, stop_request
from coca_mindspeed.utils.saving import StopRequest
from coca_mindspeed.utils.text_formats import read_yaml

#: Code of a problem, variable, value that it must have, reason (vllm-project/vllm-ascend threads 3356 and 5747).
WEIGHT_FORMAT = (
    "weight-format",
    "VLLM_ASCEND_ENABLE_NZ",
    "0",  # of the upstreams' own files, MindSpeed-RL master's runtime_env.yaml alone sets it
    "vLLM-Ascend keeps copies of NZ weights that an update does not reach, and rolls out with old weights",
)
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_END_SECONDS = 60.0  # for a child to end before it is killed
_LOG_SECONDS = 5.0  # for the log to take what is still on its way


@dataclass(frozen=True)
class Launch:
    """The typed command: the run's name or absolute path, overrides, output directory, and how to start.

    Attributes:
        command: what was typed to start it, for messages.
    """

    run: str
    overrides: tuple[str, ...] = ()
    output: Path | None = None
    dry_run: bool = False
    smoke: bool = False
    trial: bool = False
    resume: bool = False
    command: str = "coca-mindspeed launch"

    @property
    def name(self) -> str:
        """The name of the output directory."""
        return Path(self.run).stem

    def directory(self) -> Path:
        """Where the run goes: the given output, or a directory below ``runs`` by the name of the run."""
        if self.output is not None:
            return self.output
        kind = "smoke" if self.smoke else "trial" if self.trial else None
        return Path("runs") / (self.name if kind is None else f"{kind}/{self.name}-{time.strftime('%Y%m%d-%H%M%S')}")

    def refuse_overrides(self, settings: Sequence[str]) -> None:
        """Raise UsageError for an override of a key that the launch sets itself (``KEY`` or ``KEY=VALUE``)."""
        script = "--smoke" if self.smoke else "the launch script"
        for override in self.overrides:
            for setting in settings:
                if override.lstrip("+").startswith(f"{setting.partition('=')[0]}="):
                    raise UsageError(f"{script} sets {setting} itself; leave {override.lstrip('+')} out")

    def on_nodes(self, key: str, nodes: Nodes, overrides: Sequence[str]) -> tuple[str, ...]:
        """The overrides with the number of nodes; raises UsageError if one contradicts ``NNODES``."""
        for override in overrides:
            if override.lstrip("+").startswith(f"{key}="):
                require_nodes(key, override.partition("=")[2], nodes)
        return (*overrides, f"{key}={nodes.total}") if nodes.total > 1 else tuple(overrides)


class Layer(NamedTuple):
    """Overrides by which a smoke run or a trial differs from the run, and variables of its processes.

    ``defaults`` are those that a typed override may change.
    """

    defaults: tuple[str, ...]
    fixed: tuple[str, ...]
    environment: Mapping[str, str]


def read_layer(name: str) -> Layer:
    """Read a layer from its file in ``configs/``, which has the dotted keys with their values."""
    content = read_yaml(config_directory() / f"{name}.yaml")
    overrides = {}
    for section in ("defaults", "fixed"):
        values = content.get(section, {}).items()
        texts = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in values)
        overrides[section] = tuple(f"{key}={text}" for key, text in texts)
    return Layer(**overrides, environment=content.get("environment", {}))


def require_nodes(key: str, number: object, nodes: Nodes) -> None:
    """Raise UsageError for a configuration for another number of nodes than is started: Ray would wait for them."""
    if str(number) != str(nodes.total):
        how = f"start with NNODES={number} NODE_RANK=0 MASTER_ADDR=... on the first node, and leave {key} out"
        problem = Problem("nodes", key, number, f"differs from NNODES={nodes.total}", how)
        raise UsageError(str(problem), [problem])


def require_plain_weight_format() -> None:
    """Set :data:`WEIGHT_FORMAT` in the environment; raises UsageError for another value."""
    code, name, value, because = WEIGHT_FORMAT
    if (given := os.environ.setdefault(name, value)) != value:
        problem = Problem(code, name, given, f"must be {value}: {because}", "unset it; the run sets it")
        raise UsageError(str(problem), [problem])


def script() -> str | None:
    """The script of ``launch/`` that started this process, as it was typed."""
    return os.environ.get("COCA_LAUNCH_SCRIPT")


def absolute_run(name: str) -> str:
    """The name of a run, or the absolute path of its YAML file; raises UsageError if there is no such file."""
    if not name.endswith((".yaml", ".yml")):
        return name
    path = Path(name).expanduser()
    if not path.is_file():
        raise UsageError(f"{name}: no such configuration file")
    return str(path.absolute())


def go_to_the_source_tree() -> None:
    """For a script of ``launch/``: its relative paths are meant from the source tree."""
    if script():
        os.chdir(config_directory().parent)


def say(text: str) -> None:
    print_text(f"launch: {text}")


def show(*command: str) -> None:
    """Print a step, as a shell would read it."""
    print_text(f"+ {shlex.join(command)}")


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """Exit with 128 and the signal's number at the first SIGHUP, SIGINT or SIGTERM, and ignore the others.

    A signal that is ignored (by ``nohup``) stays so.  Ray may put another exception in the place of ours.
    """
    received: list[int] = []

    def end(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        for other in _ENDING:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    heeded = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, end) for number in heeded}
    try:
        yield
    finally:
        if received:
            raise SystemExit(128 + received[0]) from None
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def stopping_by_signals(call: Launch) -> Iterator[None]:
    """Let the training stop after its step, with a checkpoint, at the first SIGINT or SIGTERM; the second ends it.

    Raises InterruptedRunError if the training has stopped so, of itself or because another node was asked to.
    """
    request = StopRequest.of(call.directory())

    def ask() -> None:
        claim = read_claim(call.directory() / CLAIM)
        if claim is not None and not claim.is_of(Claimant.this_process().claim()):
            signal.raise_signal(signal.SIGTERM)  # the directory is lost: the file would stop the run that has it
        request.ask()

    request.withdraw()  # of an earlier start
    try:
        with stop_request(ask):
            yield
        if (step := request.answered()) is not None:
            saved = f"stopped after step {step}, which is saved in {call.directory()}"
            raise InterruptedRunError(saved if step else "stopped before the first step", "continue with --resume")
    finally:
        request.withdraw()


def ask_the_doctor(
    call: Launch, overrides: Sequence[str], examine: Callable[[], Sequence[Finding]], instead: str
) -> None:
    """Raise ConfigError if this machine is not ready, unless ``SKIP_DOCTOR`` is set.

    ``instead`` is a sentence on a start without the devices.
    """
    show("coca-mindspeed", "doctor", call.run, *overrides)
    if call.dry_run or os.environ.get("SKIP_DOCTOR"):
        return
    if not show_findings(examine(), only_problems=True):
        raise ConfigError(
            f"this machine is not ready for {call.run} (above: what is missing and how to get it; SKIP_DOCTOR=1 starts "
            f"all the same).\n{instead}"
        )


def open_log(directory: Path, rank: int) -> None:
    """Write all output from here on, of native libraries and children too, also to a file in ``directory/logs``.

    Two processes copy it; they ignore the signals that end this one, and are given a few seconds when it exits.
    """
    file = directory / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-node{rank}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    say(f"this output is also written to {file}")
    writers = []
    for stream in (sys.stdout, sys.stderr):
        number = stream.fileno()
        original = os.dup(number)
        command = ["bash", "-c", "trap '' HUP INT TERM; exec tee -a \"$0\"", str(file)]
        writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=original)
        assert writer.stdin is not None
        os.dup2(writer.stdin.fileno(), number)
        writer.stdin.close()
        writers.append((stream, number, original, writer))

    def close() -> None:
        for stream, number, original, _ in writers:
            stream.flush()
            os.dup2(original, number)
        end = time.monotonic() + _LOG_SECONDS  # a process that outlives this one may hold the log open
        for *_, writer in writers:
            try:
                writer.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                writer.kill()

    atexit.register(close)  # after the last message of this process


def python() -> str:
    """The interpreter of this run's processes: a script of ``launch/`` names its own, which may be a wrapper."""
    return os.environ.get("PYTHON", sys.executable) if script() else sys.executable


@contextmanager
def child(command: Sequence[str], **options: object) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a command beside this process, and end it at the end."""
    sys.stdout.flush()
    process: subprocess.Popen[bytes] = subprocess.Popen(command, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_child(command: Sequence[str], *, dry_run: bool = False, **options: object) -> int:
    """Show a command, run it unless it is a dry run, and return its exit code."""
    show(*command)
    if dry_run:
        return 0
    with child(command, **options) as process:
        code = process.wait()
    return code if code >= 0 else 128 - code


def named_cluster() -> str | None:
    """The address in ``RAY_ADDRESS`` of a Ray cluster that is to be joined; None if a run starts its own."""
    address = os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def require_free_port(nodes: Nodes) -> None:
    """Raise ConfigError if the head's port is taken: another Ray would be joined."""
    if named_cluster() is None and _head_is_there(nodes):
        problem = Problem("port", "RAY_PORT", nodes.port, f"is taken at {nodes.address}, by another Ray perhaps")
        problem = problem._replace(fix="set RAY_PORT to a free port on every node")
        raise ConfigError(str(problem), [problem])


@contextmanager
def ray_cluster(
    nodes: Nodes, options: Sequence[str], number: int, resource: str | None = None, *, dry_run: bool
) -> Iterator[None]:
    """Start Ray's head on this node, wait for the others, and end it at the end; ``RAY_ADDRESS`` is its address.

    ``options`` are of ``ray start``.  The cluster is to have ``number`` nodes, or as much of a resource.  One that
    ``RAY_ADDRESS`` names already is joined instead, and goes on.  Raises as :func:`wait_for_cluster`.
    """
    set_ray_defaults()
    head: list[Callable[[], int | None]] = []
    with ExitStack() as cluster:
        if (address := named_cluster()) is not None:
            show("join", address)
        else:
            command = _ray_start(nodes, "--head", f"--port={nodes.port}", f"--node-ip-address={nodes.address}")
            command += ["--include-dashboard=false", *options]
            show(*command)
            os.environ["RAY_ADDRESS"] = nodes.head
            cluster.callback(os.environ.pop, "RAY_ADDRESS", None)
            if not dry_run:
                say(f"starting Ray on this node, for up to {nodes.timeout} seconds")
                # Ctrl-C in a terminal is for this process alone.
                head = [cluster.enter_context(child(command, start_new_session=True)).poll]
        show("wait", str(nodes.timeout), str(number), f"{resource}s" if resource else "nodes")
        if not dry_run:
            wait_for_cluster(number, resource, nodes.timeout, *head)
        yield


def join_cluster(nodes: Nodes, options: Sequence[str], call: Launch) -> int:
    """Work for the head until it ends the cluster; return the exit code of this node.

    The first SIGINT or SIGTERM asks the training to stop, by a file that the head sees on a shared file system.  Raises
    TrainingError if there is no head within ``CLUSTER_TIMEOUT``.
    """
    if (address := named_cluster()) is not None:
        raise UsageError(f"RAY_ADDRESS={address}: its nodes are there already; start the run with NODE_RANK=0 alone")
    command = [*_ray_start(nodes, f"--address={nodes.head}"), *options]
    if call.dry_run:
        show(*command)
        return 0
    say(f"waiting for the Ray head at {nodes.head}, for up to {nodes.timeout} seconds")
    end = time.monotonic() + nodes.timeout
    while not _head_is_there(nodes):
        if time.monotonic() >= end:
            raise TrainingError(f"no Ray head at {nodes.head} after {nodes.timeout} seconds")
        time.sleep(2)
    say(f"starting Ray on this node, for up to {nodes.timeout} seconds")
    with stop_request(StopRequest.of(call.directory()).ask):
        code = run_child(command, start_new_session=True)
    # It ends with 1 when the head does, and when it could not join it.
    if code and not _head_is_gone(nodes):
        raise TrainingError(f"Ray has ended on this node with code {code}, and the head at {nodes.head} goes on")
    say("the head has ended the cluster; it has the training's exit code")
    return 0


def _ray_start(nodes: Nodes, *options: str) -> list[str]:
    module = "coca_mindspeed.upstream.ray_cluster"
    return [python(), "-m", module, "start", str(nodes.timeout), "--block", *options]


def _head_is_there(nodes: Nodes) -> bool:
    """Whether the head's port is open.  Where packets are dropped, the system would go on trying for two minutes."""
    try:
        socket.create_connection((nodes.address, nodes.port), timeout=2).close()
    except OSError:
        return False
    return True


def _head_is_gone(nodes: Nodes) -> bool:
    """Whether the head is gone, or about to go: its processes do not end all at once."""
    for _ in range(5):
        if not _head_is_there(nodes):
            return True
        time.sleep(1)
    return not _head_is_there(nodes)
