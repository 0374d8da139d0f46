"""Readiness of a machine for a run on Ascend: each item with the value found, the value wanted and how to fix it.

Nothing here imports torch_npu, Ray or MindSpeed-RL, so broken installations of them are reported too.
"""

import contextlib
import importlib.metadata
import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, NamedTuple

from coca_mindspeed.config.checks import missing_data, missing_model
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import CocaError, Problem, problems_of
from coca_mindspeed.mindspeed.checkpoints import checkpoint_layout
from coca_mindspeed.mindspeed.plan import ClusterPlan, checkpoint_bytes, host_gib, make_plan, most_checkpoints
from coca_mindspeed.mindspeed.start.driver import CHECKOUTS
from coca_mindspeed.mindspeed.start.records import check_verifier
from coca_mindspeed.upstream.manifest import ManifestError, SoftwareStack, load_manifests, matching_manifest, stack_of
from coca_mindspeed.utils.process import GIB, memory_limit, usable_cpus

_DEFAULT_RELEASE = "2.3.0"
_OPEN_FILES = 32768  # Ray opens a few hundred sockets per worker, and zmq one for each pair of ranks
_OBJECT_STORE = 10**10  # Ray's REQUIRE_SHM_SIZE_THRESHOLD: with less in /dev/shm, its object store is put into /tmp
_CPUS = {"placement_group": 8, "local_task": 1}  # MindSpeed-RL's defaults of rl_config.num_cpus_for_*
_DOCK_CPUS = 10  # reserved by GRPOTransferDock on one node
_LONGEST_SOCKET = 107  # bytes of a path in sockaddr_un, to which Ray keeps
_RAYS_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"  # below its temporary directory
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_GUIDE = "docs/ascend.md, 1. Software"  # vLLM and vLLM-Ascend are built from a commit there, not installed by a name


@dataclass(frozen=True)
class Machine:
    """Facts of this machine; ``root`` is the root of its file system."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")

    def package_version(self, name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def cpus(self) -> int:
        return usable_cpus()

    def free_bytes(self, path: Path) -> int:
        """Free bytes at ``path``, or at its nearest existing parent."""
        path = path.absolute()
        return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free

    def shared_memory_bytes(self) -> int | None:
        """Size of ``/dev/shm``; None if it does not exist."""
        path = self.root / "dev" / "shm"
        return shutil.disk_usage(path).total if path.is_dir() else None

    def open_files(self) -> int:
        """The hard limit of open files, up to which the launch scripts raise the soft one."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        return 2**63 - 1 if hard == resource.RLIM_INFINITY else hard

    def address_towards(self, host: str) -> str | None:
        """The address of this machine from which it reaches ``host``; None if it has none.  Nothing is sent."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
        return None

    def cann_version(self) -> str | None:
        """The version in CANN's folder, which its ``set_env.sh`` names."""
        value = self.environment.get("ASCEND_TOOLKIT_HOME") or self.environment.get("ASCEND_HOME_PATH")
        if not value:
            return None
        home = Path(value)
        for path in [*sorted(home.glob("*/ascend_toolkit_install.info")), home / "ascend_toolkit_install.info"]:
            if version := _read(path, r"^version=(\S+)"):
                return version
        return _read(home / "version.cfg", r"^\S*running_version=\[?(?:\d+:)?([^\]\s]+)")


class Finding(NamedTuple):
    """One checked item; a problem unless ``ok``."""

    ok: bool
    problem: Problem


def _item(code: str, key: str, found: Any, ok: object, wanted: str, fix: str) -> Finding:
    return Finding(bool(ok), Problem(code, key, found, f"wanted {wanted}", "" if ok else fix))


def releases() -> list[str]:
    """The supported releases of MindSpeed-RL."""
    return [manifest.release for manifest in load_manifests()]


def examine_machine(
    machine: Machine, run: RunConfig | None, release: str | None = None, output: Path | None = None
) -> list[Finding]:
    """Examine a machine for a run; without one, examine the requirements of every run.

    ``release`` None: that in ``MINDSPEED_RL_HOME``, or 2.3.0 if it is unknown; ``output`` None is below ``runs``.
    No item of an NPU is examined for the CPU shim.
    """
    checkout, found_release = _mindspeed_rl(machine)
    stack = stack_of(release or found_release or _DEFAULT_RELEASE)
    sources = [checkout, *_sources(machine, stack), *_ray(machine, run)]
    of_run = [] if run is None else [*_run(machine, run, output or Path("runs"))]
    if run is not None and run.hardware.platform == "host":
        return [*sources, *of_run]
    return [*_software(machine, stack), *sources, *_hardware(machine, run), *of_run]


def _software(machine: Machine, stack: SoftwareStack) -> Iterator[Finding]:
    driver = _read(machine.root / "usr/local/Ascend/driver/version.info", r"^Version=(\S+)")
    new = driver is not None and _numbers(driver) >= _numbers(stack.driver)
    fix = "install Ascend-hdk-*-npu-driver, then the firmware"
    yield _item("driver", "NPU driver", driver, new, f"{stack.driver} or newer", fix)
    cann, atb = machine.cann_version(), machine.environment.get("ATB_HOME_PATH")
    fix = "install {}, and source its set_env.sh (the launch scripts source it where it is installed)"
    toolkit = fix.format(f"CANN {stack.cann} toolkit and kernels")
    yield _item("cann", "CANN", cann, cann and is_version(cann, stack.cann), stack.cann, toolkit)
    yield _item("atb", "ATB (NNAL)", atb, atb, "ATB_HOME_PATH set", fix.format("Ascend-cann-nnal"))
    for name, wanted in stack.packages.items():
        version = machine.package_version(name)
        fix = _GUIDE if name.startswith("vllm") else f"pip install {name}=={wanted} ({_GUIDE})"
        yield _item("package", name, version, version and is_version(version, wanted), wanted, fix)
    triton = machine.package_version("triton-ascend")
    fix = "pip uninstall triton-ascend: MindSpeed-RL forbids it beside vllm-ascend"
    yield _item("package", "triton-ascend", triton, triton is None, "absent", fix)


def _mindspeed_rl(machine: Machine) -> tuple[Finding, str | None]:
    """MindSpeed-RL's checkout by its fingerprints, and its release if they match one."""
    value, wanted = machine.environment.get("MINDSPEED_RL_HOME", ""), f"unedited checkout of {' or '.join(releases())}"
    if not value:
        return _item("checkout", "MindSpeed-RL", None, False, wanted, "set MINDSPEED_RL_HOME"), None
    try:
        release = matching_manifest(Path(value)).release
    except ManifestError as error:
        return _item("checkout", "MindSpeed-RL", value, False, wanted, str(error)), None
    copies = [each for each in CHECKOUTS.values() if each != "mindspeed_rl" and (Path(value) / each).is_dir()]
    unused = f" (its copies of {', '.join(copies)} are not used)" if copies else ""
    return _item("checkout", "MindSpeed-RL", f"{release} at {value}{unused}", True, wanted, ""), release


def _sources(machine: Machine, stack: SoftwareStack) -> Iterator[Finding]:
    for variable, package in CHECKOUTS.items():
        if variable == "MINDSPEED_RL_HOME":
            continue
        value = machine.environment.get(variable, "")
        path = Path(value)
        if not value or not (path / package).is_dir():
            fix = f"set {variable} to a checkout that holds {package}/ (docs/ascend.md)"
            yield _item("checkout", package, value or None, False, f"a checkout in {variable}", fix)
        elif package == "megatron":
            version, fix = megatron_version(path), f"git checkout core_v{stack.megatron} in {value}"
            yield _item("commit", "Megatron-LM", version, version == stack.megatron, stack.megatron, fix)
        else:
            wanted, commit = stack.mindspeed if package == "mindspeed" else stack.mindspeed_llm, _commit_of(path)
            shown = commit[:7] if commit else "unknown: no git history"  # of a plain copy
            same, fix = commit is None or commit.startswith(wanted), f"git checkout {wanted[0]} in {value}"
            yield _item("commit", package, shown, same, " or ".join(wanted), fix)


def _ray(machine: Machine, run: RunConfig | None) -> Iterator[Finding]:
    """Variables that would keep the processes of Ray from each other."""
    environment = machine.environment
    variable = "RAY_TMPDIR" if "RAY_TMPDIR" in environment else "TMPDIR"
    directory, longest = environment.get(variable, "/tmp"), _LONGEST_SOCKET - len(_RAYS_SOCKET)
    wanted = f"at most {longest} bytes, for Ray's sockets below it have paths of at most {_LONGEST_SOCKET}"
    yield _item("tmpdir", variable, directory, len(os.fsencode(directory)) <= longest, wanted, "export RAY_TMPDIR=/tmp")
    proxy = next((name for each in _PROXIES for name in (each, each.upper()) if environment.get(name)), None)
    head = environment.get("MASTER_ADDR") or "127.0.0.1"
    several = run is not None and run.hardware.nodes > 1
    nodes = dict.fromkeys(filter(None, (head, machine.address_towards(head) if several else None)))
    past = environment.get("no_proxy") or environment.get("NO_PROXY")
    ok = proxy is None or all(_bypasses(past or "", address) for address in nodes)
    wanted = f"the addresses of all nodes ({', '.join(nodes)}) if a proxy is exported ({proxy or 'none'})"
    fix = f"export no_proxy={','.join(filter(None, (past, *nodes)))} on every node, or unset {proxy}"
    yield _item("proxy", "no_proxy", past, ok, wanted, fix)


def _bypasses(no_proxy: str, host: str) -> bool:
    """Whether ``no_proxy`` names a host, by name, suffix, address or network."""
    for each in map(str.strip, no_proxy.split(",")):
        name = each.lstrip(".").lower()
        if name == "*" or (name and f".{host.lower()}".endswith(f".{name}")):
            return True
        with contextlib.suppress(ValueError):
            if "/" in each and ip_address(host) in ip_network(each.strip(), strict=False):
                return True
    return False


def _hardware(machine: Machine, run: RunConfig | None) -> Iterator[Finding]:
    """Devices, and the limits of this machine that a run meets."""
    preloaded = machine.environment.get("LD_PRELOAD", "").replace(":", " ").split()
    jemalloc = next((path for path in preloaded if "jemalloc" in path), None)
    fix = "apt install libjemalloc2 (yum install jemalloc); the launch scripts preload it where it is installed"
    yield _item("jemalloc", "jemalloc", jemalloc, jemalloc and Path(jemalloc).is_file(), "preloaded", fix)
    hard, fix = machine.open_files(), "raise the hard limit in /etc/security/limits.conf"
    yield _item("open-files", "open files", hard, hard >= _OPEN_FILES, f"a hard limit of {_OPEN_FILES} or more", fix)
    known = [name for _, name in socket.if_nameindex()]
    for variable in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        name = machine.environment.get(variable)
        ok = (run is None or run.hardware.nodes == 1) if name is None else name in known
        fix = f"export {variable}=one of {', '.join(known)}, the interface that reaches the other nodes"
        yield _item("network", variable, name, ok, "an interface of this machine if the run has several nodes", fix)
    devices = (path.name.removeprefix("davinci") for path in (machine.root / "dev").glob("davinci*"))
    found, wanted = sum(map(str.isdecimal, devices)), 1 if run is None else run.hardware.npus_per_node
    ok = found >= wanted if run is None else found == wanted
    fix = "install driver and firmware; in a container pass /dev/davinci* through; or choose another hardware="
    yield _item("npus", "NPUs", found, ok, f"{wanted}{' or more' if run is None else ''}", fix)
    if run is not None:
        # Ray gives every NPU its CPUs on the same node, and waits forever if there are too few.  The others may all be
        # on this node: the transfer dock, the task of train, a rule reward per node, and the advantage stage.
        rl = run.mindspeed_rl.get("rl_config") or {}
        per_npu, task = (int(rl.get(f"num_cpus_for_{what}", default)) for what, default in _CPUS.items())
        others = _DOCK_CPUS + 1 + (run.hardware.nodes + 1) * task
        needed, found = per_npu * wanted + others, machine.cpus()
        shown = f"{needed} or more ({per_npu} per NPU, {others} others)"
        fix = f"lower mindspeed_rl.rl_config.num_cpus_for_placement_group ({per_npu}), or allow more CPUs"
        yield _item("cpus", "CPUs", found, found >= needed, shown, fix)


def _run(machine: Machine, run: RunConfig, output: Path) -> Iterator[Finding]:
    """The problems of ``coca-mindspeed check``, then the files of the run, disk space and host memory."""
    plan: ClusterPlan | None = None
    try:
        plan = make_plan(run)
        problems = [*plan.problems]
    except CocaError as error:
        problems = problems_of(error, "plan", "configuration")
    absent = [*missing_data(run), *missing_model(run)]
    yield from (Finding(False, problem) for problem in (*problems, *absent))
    if not problems:
        yield _item("plan", "configuration", "no problems", True, "no problems", "")
    if plan is not None:
        if run.hardware.platform == "npu" or plan.resolved.load:
            yield _weights(run, plan)
        yield _disk(machine, run, plan, output)
        if plan.memory:
            yield from _host_memory(machine, host_gib(plan.resolved))
    yield _grader(run)


def _weights(run: RunConfig, plan: ClusterPlan) -> Finding:
    wanted, path = (plan.resolved.tp, plan.resolved.pp), str(plan.resolved.load)
    shown, fix = f"Megatron weights for TP {wanted[0]}, PP {wanted[1]}", "bash launch/convert_weights.sh hf2mcore RUN"
    try:
        layout = checkpoint_layout(Path(path))
    except CocaError as error:
        return _item("weights", "weights", path, False, shown, f"{fix} ({error})")
    return _item("weights", "weights", f"TP {layout.tp}, PP {layout.pp}", layout == wanted, shown, fix)


def _disk(machine: Machine, run: RunConfig, plan: ClusterPlan, output: Path) -> Finding:
    """Space for the checkpoints that are kept, and for one that is being written."""
    present = sum(1 for _ in output.glob("stage*/checkpoints/iter_*"))
    most = most_checkpoints(plan.resolved, plan.iterations, len(run.method.training_method.stages))
    more = max(1, most - present)
    needed, free = more * checkpoint_bytes(plan.resolved), machine.free_bytes(output)
    wanted = f"{needed / 1e9:.0f} GB or more for {more} checkpoints"
    fix = f"free space at {output}, choose another --output, or lower checkpoint.keep ({run.checkpoint.keep})"
    return _item("disk", "free space", f"{free / 1e9:.0f} GB", free >= needed, wanted, fix)


def _host_memory(machine: Machine, needed: float) -> Iterator[Finding]:
    """A node's memory, as of the machine and of its container, and the space of Ray's object store."""
    kib = _read(machine.root / "proc" / "meminfo", r"^MemTotal:\s+(\d+) kB")
    wanted = f"{needed:.0f} GiB or more by estimate, without Ray's object store and the data"
    raise_tp = "or raise mindspeed_rl.generate_config.infer_tensor_parallel_size"
    memory = int(kib) * 1024 if kib else None
    for code, key, size, absent, fix in (
        ("host-memory", "host memory", memory, "unknown", "use nodes with more memory, or more nodes"),
        # of the control group, which is a container's
        ("cgroup-memory", "cgroup memory limit", memory_limit(machine.root), "none", "docker run --memory"),
    ):
        shown = absent if size is None else f"{size / GIB:.0f} GiB"
        yield _item(code, key, shown, size is None or size >= needed * GIB, wanted, f"{fix}, {raise_tp}")
    shm = machine.shared_memory_bytes()
    shown, wanted = "unknown" if shm is None else f"{shm / 1e9:.1f} GB", f"{_OBJECT_STORE / 1e9:.0f} GB or more for Ray"
    fix = "enlarge it (docker run --shm-size=64g, or mount -o remount,size=64G /dev/shm): Ray would use /tmp instead"
    yield _item("shared-memory", "/dev/shm", shown, shm is None or shm >= _OBJECT_STORE, wanted, fix)


def _grader(run: RunConfig) -> Finding:
    """Whether the grader can be built: every node grades its share.  The driver checks the gold answers."""
    names = list((run.mindspeed_rl.get("rl_config") or {}).get("verifier_function") or [])
    grader, problem = run.data.grader, ""
    named = (run.data.train, run.data.evaluate) if grader == "auto" else ()  # which names one for each record
    try:
        check_verifier(names, grader, run.data.grader_options, [Path(path) for path in named if path is not None])
    except (CocaError, ImportError) as error:
        problem = str(error)
    shown = f"{', '.join(names)} ({run.data.grader})"
    return _item("grader", "grader", shown, not problem, "can be built here", problem)


def _commit_of(checkout: Path) -> str | None:
    """The commit of a checkout; None if it is not a repository, which another repository may contain."""
    command = ["git", f"--git-dir={checkout / '.git'}", "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def megatron_version(checkout: Path) -> str | None:
    """Version of Megatron-core in a checkout, without importing it."""
    path = checkout / "megatron" / "core" / "package_info.py"
    parts = [_read(path, rf"^{name}\s*=\s*(\d+)") for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part for part in parts if part) if all(parts) else None


def is_version(found: str, wanted: str) -> bool:
    """Whether ``found`` is ``wanted`` or a build of it: ``2.5.1.post1`` and ``2.5.1+cpu`` are 2.5.1, 2.5.10 is not."""
    rest = found.removeprefix(wanted)
    return found.startswith(wanted) and not rest[:1].isdecimal()


def _read(path: Path, pattern: str) -> str | None:
    try:
        found = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"(\d+\.?)*", version)
    return tuple(map(int, re.findall(r"\d+", leading[0]))) if leading else ()
