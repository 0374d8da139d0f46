"""Readiness of a machine for a run on Ascend: each item with the value found, the value wanted and how to fix it.

Nothing here imports torch_npu, Ray or MindSpeed-RL, so broken installations of them are reported too.
"""

import importlib.metadata
import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, NamedTuple

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from coca_mindspeed.config.checks import missing_data, missing_model
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import CocaError, Problem, problems_of, show_value
from coca_mindspeed.mindspeed.checkpoints import checkpoint_layout
from coca_mindspeed.mindspeed.hooks import applied_patch
from coca_mindspeed.mindspeed.keys import NativeRun
from coca_mindspeed.mindspeed.native import renamed
from coca_mindspeed.mindspeed.plan import ClusterPlan, checkpoint_bytes, host_gib, make_plan, most_checkpoints
from coca_mindspeed.mindspeed.start.driver import CHECKOUTS
from coca_mindspeed.mindspeed.start.verifiers import check_verifier
from coca_mindspeed.upstream.manifest import SoftwareStack, load_manifests, matching_manifest, stack_of
from coca_mindspeed.upstream.nodes import means_this_machine
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.process import GIB, memory_limit, usable_cpus

_OPEN_FILES = 32768  # Ray opens a few hundred sockets per worker, and zmq one for each pair of ranks
_LONGEST_TMPDIR = 39  # bytes: paths of Ray's sockets have at most 107, 68 of them below it
_OBJECT_STORE = 10**10  # Ray's REQUIRE_SHM_SIZE_THRESHOLD: with less in /dev/shm, its object store is put into /tmp
_LOOPBACK = "lo"
_DOCK_CPUS = 10  # reserved by GRPOTransferDock on one node


def _package_version(name: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _disk_usage(path: Path) -> Any:
    """Total and free bytes at ``path``, or at its nearest existing parent."""
    return shutil.disk_usage(next(place for place in (path.absolute(), *path.absolute().parents) if place.exists()))


def _address_towards(host: str) -> str | None:
    """The address of this machine from which it reaches ``host``; None if it has none.  Nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return None


def _owns_address(address: str) -> bool:
    """Whether an IP address is one of this machine's: only to those may a socket be bound."""
    with suppress(ValueError, OSError):
        version = ip_address(address.partition("%")[0]).version
        with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    return False


@dataclass(frozen=True)
class Machine:
    """Facts of this machine; ``root`` is the root of its file system, ``open_files`` the hard limit (-1: none)."""

    environment: Mapping[str, str] = field(default_factory=os.environ.copy)
    root: Path = Path("/")
    cpus: int = field(default_factory=usable_cpus)
    open_files: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    package_version: Callable[[str], str | None] = _package_version
    disk_usage: Callable[[Path], Any] = _disk_usage
    address_towards: Callable[[str], str | None] = _address_towards
    interfaces: Sequence[str] = field(default_factory=lambda: [name for _, name in socket.if_nameindex()])
    owns_address: Callable[[str], bool] = _owns_address


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
    machine: Machine,
    run: RunConfig | None,
    release: str | None = None,
    output: Path | None = None,
    plan: ClusterPlan | None = None,
) -> list[Finding]:
    """Examine a machine for a run; without one, examine the requirements of every run.

    ``plan`` is that of the run if it was made already.

    ``release`` None: that in ``MINDSPEED_RL_HOME``, or 2.3.0 if it is unknown; ``output`` None is below ``runs``.
    No item of an NPU is examined for the CPU shim.
    """
    checkout, found_release = _mindspeed_rl(machine)
    stack = stack_of(release or found_release or "2.3.0")
    found = [checkout, *_sources(machine, stack), *_ray(machine, run)]
    if run is None or run.hardware.platform == "npu":
        found = [*_software(machine, stack), *found, *_hardware(machine, run)]
    if run is None:
        return found
    found += _run(machine, run, output or Path("runs"), plan)
    return [Finding(ok, renamed(problem)) for ok, problem in found] if isinstance(run, NativeRun) else found


def _software(machine: Machine, stack: SoftwareStack) -> Iterator[Finding]:
    environment, guide = machine.environment, "docs/ascend.md, 2. Software"
    driver = _read(machine.root / "usr/local/Ascend/driver/version.info", r"^Version=(\S+)")
    new, fix = _reaches(driver, stack.driver), "install Ascend-hdk-*-npu-driver, then the firmware"
    yield _item("driver", "NPU driver", driver, new, f"{stack.driver} or newer", fix)
    home = environment.get("ASCEND_TOOLKIT_HOME") or environment.get("ASCEND_HOME_PATH")
    names = ("*/ascend_toolkit_install.info", "ascend_toolkit_install.info", "version.cfg") if home else ()
    pattern = r"^(?:\S*running_)?version=\[?(?:\d+:)?([^\]\s]+)"
    versions = (_read(path, pattern) for name in names for path in sorted(Path(str(home)).glob(name)))
    cann = next(filter(None, versions), None)
    fix = "install {}, and source its set_env.sh (the launch scripts source it where it is installed)"
    toolkit = fix.format(f"CANN {stack.cann} toolkit and ops")
    yield _item("cann", "CANN", cann, _is_build_of(cann, stack.cann), stack.cann, toolkit)
    atb = environment.get("ATB_HOME_PATH")
    yield _item("atb", "ATB (NNAL)", atb, atb, "ATB_HOME_PATH set", fix.format("Ascend-cann-nnal"))
    for name, wanted in stack.packages.items():
        version = machine.package_version(name)
        # From commits, and from wheels: pip's torch for Linux is a CUDA build.
        by_hand = name.startswith(("vllm", "torch", "apex"))
        fix = guide if by_hand else f"pip install {name}=={wanted} ({guide})"
        yield _item("package", name, version, _is_build_of(version, wanted), wanted, fix)
    triton, fix = machine.package_version("triton-ascend"), "pip uninstall triton-ascend: MindSpeed-RL forbids it"
    yield _item("package", "triton-ascend", triton, triton is None, "absent", fix)


def _mindspeed_rl(machine: Machine) -> tuple[Finding, str | None]:
    """MindSpeed-RL's checkout by its fingerprints and its patch, and its release if they match one."""
    home, wanted = (
        machine.environment.get("MINDSPEED_RL_HOME"),
        f"checkout of {' or '.join(releases())}, unedited or patched as a whole",
    )
    if not home:
        return _item("checkout", "MindSpeed-RL", None, False, wanted, "set MINDSPEED_RL_HOME"), None
    release = None
    try:
        manifest = matching_manifest(Path(home))
        release = manifest.release
        patch = applied_patch(manifest, Path(home))
    except CocaError as error:
        return _item("checkout", "MindSpeed-RL", home, False, wanted, str(error)), release
    copies = [each for each in CHECKOUTS.values() if each != "mindspeed_rl" and (Path(home) / each).is_dir()]
    unused = f" (its copies of {', '.join(copies)} are not used)" if copies else ""
    patched = "" if patch is None else f", patched by coca_mindspeed {patch}"
    found = f"{release} at {home}{patched}{unused}"
    return _item("checkout", "MindSpeed-RL", found, True, wanted, ""), release


def _sources(machine: Machine, stack: SoftwareStack) -> Iterator[Finding]:
    for variable, versions, tag in (
        ("MEGATRON_HOME", (stack.megatron,), f"core_v{stack.megatron}"),
        ("MINDSPEED_HOME", stack.mindspeed, stack.mindspeed[0]),
        ("MINDSPEED_LLM_HOME", stack.mindspeed_llm, stack.mindspeed_llm[0]),
    ):
        home, package = machine.environment.get(variable), CHECKOUTS[variable]
        if not home or not (Path(home) / package).is_dir():
            fix = f"set {variable} to a checkout that holds {package}/ (docs/ascend.md)"
            yield _item("checkout", package, home or None, False, f"a checkout in {variable}", fix)
            continue
        if package == "megatron":
            file = Path(home) / "megatron" / "core" / "package_info.py"
            parts = (_read(file, rf"^{name}\s*=\s*(\d+)") for name in ("MAJOR", "MINOR", "PATCH"))
            key, found = "Megatron-LM", ".".join(part or "?" for part in parts)
        else:  # a plain copy has no git history
            key, found = package, _commit_of(Path(home)) or "unknown: no git history"
        same = found.startswith((*versions, "unknown"))
        yield _item("commit", key, found, same, " or ".join(versions), f"git checkout {tag} in {home}")


def _ray(machine: Machine, run: RunConfig | None) -> Iterator[Finding]:
    """Variables that would keep the processes of Ray from each other."""
    environment = machine.environment
    variable = "RAY_TMPDIR" if "RAY_TMPDIR" in environment else "TMPDIR"
    directory, wanted = (
        environment.get(variable, "/tmp"),
        f"at most {_LONGEST_TMPDIR} bytes, for Ray's sockets in it",
    )
    short = len(os.fsencode(directory)) <= _LONGEST_TMPDIR
    yield _item("tmpdir", variable, directory, short, wanted, "export RAY_TMPDIR=/tmp")
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    proxy = next((name for name, value in environment.items() if name.lower() in proxies and value), None)
    head, several = environment.get("MASTER_ADDR") or "127.0.0.1", run is not None and run.hardware.nodes > 1
    nodes = dict.fromkeys(filter(None, (head, machine.address_towards(head) if several else None)))
    past = environment.get("no_proxy") or environment.get("NO_PROXY")
    ok = proxy is None or all(_bypasses(past or "", address) for address in nodes)
    wanted = f"the addresses of all nodes ({', '.join(nodes)}) if a proxy is exported ({proxy or 'none'})"
    fix = f"export no_proxy={','.join(filter(None, (past, *nodes)))} on every node, or unset {proxy}"
    yield _item("proxy", "no_proxy", past, ok, wanted, fix)


def _bypasses(no_proxy: str, host: str) -> bool:
    """Whether ``no_proxy`` names a host, by name, suffix, address or network."""
    for part in filter(None, (part.strip().lower() for part in no_proxy.split(","))):
        if part == "*" or f".{host.lower()}".endswith(f".{part.lstrip('.')}"):
            return True
        with suppress(ValueError):
            if "/" in part and ip_address(host) in ip_network(part, strict=False):
                return True
    return False


def _hardware(machine: Machine, run: RunConfig | None) -> Iterator[Finding]:
    """Devices, and the limits of this machine that a run meets."""
    environment, (nodes, per_node) = machine.environment, (1, 1)
    if run is not None:
        nodes, per_node = run.hardware.nodes, run.hardware.npus_per_node
    preloaded = environment.get("LD_PRELOAD", "").replace(":", " ").split()
    jemalloc = next((path for path in preloaded if "jemalloc" in path), None)
    fix = "apt install libjemalloc2 (yum install jemalloc); the launch scripts preload it where it is installed"
    yield _item("jemalloc", "jemalloc", jemalloc, jemalloc and Path(jemalloc).is_file(), "preloaded", fix)
    hard, fix = machine.open_files, "raise the hard limit in /etc/security/limits.conf"
    enough = hard == resource.RLIM_INFINITY or hard >= _OPEN_FILES
    yield _item("open-files", "open files", hard, enough, f"a hard limit of {_OPEN_FILES} or more", fix)
    yield from _network(machine, several=nodes > 1)
    yield _npus(machine, None if run is None else per_node)
    if run is not None:
        # Ray gives every NPU its CPUs on the same node, and waits forever if there are too few.  The others may all be
        # on this node: the transfer dock, the task of train, a rule reward per node, and the advantage task.
        rl = run.mindspeed_rl.get("rl_config") or {}
        per_npu, task = int(rl.get("num_cpus_for_placement_group", 8)), int(rl.get("num_cpus_for_local_task", 1))
        others, cpus = _DOCK_CPUS + 1 + (nodes + 1) * task, machine.cpus
        wanted = f"{per_npu * per_node + others} or more ({per_npu} per NPU, {others} others)"
        fix = f"lower mindspeed_rl.rl_config.num_cpus_for_placement_group ({per_npu}), or allow more CPUs"
        yield _item("cpus", "CPUs", cpus, cpus >= per_npu * per_node + others, wanted, fix)


def _network(machine: Machine, *, several: bool) -> Iterator[Finding]:
    """The interfaces by which HCCL and Gloo find the other nodes; CANN lets ``HCCL_IF_IP`` win over a name."""
    environment, known = machine.environment, machine.interfaces
    where = "of this machine that reaches the other nodes" if several else "of this machine"
    fix = f"export {{}}=one of {', '.join(name for name in known if name != _LOOPBACK)}"
    if address := environment.get("HCCL_IF_IP"):
        ok = machine.owns_address(address) and not (several and means_this_machine(address))
        yield _item("network", "HCCL_IF_IP", address, ok, f"an address {where}", "correct or unset HCCL_IF_IP")
    else:
        variable = "HCCL_SOCKET_IFNAME"
        value = environment.get(variable)
        found = hccl_interfaces(value or "", known)
        ok = any(name != _LOOPBACK or not several for name in found) if value else not several
        yield _item("network", variable, value, ok, f"an interface {where}", fix.format(variable))
    variable = "GLOO_SOCKET_IFNAME"
    value = environment.get(variable)
    found = (value or "").split(",")  # Gloo opens a device on each
    ok = {*found} <= {*known} and not (several and _LOOPBACK in found) if value else not several
    yield _item("network", variable, value, ok, f"an interface {where}", fix.format(variable))


def hccl_interfaces(pattern: str, known: Sequence[str]) -> list[str]:
    """The interfaces that a value of ``HCCL_SOCKET_IFNAME`` names.

    ``eth,enp`` names those that begin so, ``=eth0,eth1`` exactly those; ``^eth`` and ``^=eth0`` name all others.
    """
    others, exactly = pattern.startswith("^"), pattern.removeprefix("^").startswith("=")
    listed = pattern.removeprefix("^").removeprefix("=").split(",")
    if not all(listed):
        return []
    return [name for name in known if (name in listed if exactly else name.startswith(tuple(listed))) != others]


def _npus(machine: Machine, wanted: int | None) -> Finding:
    """The devices of the machine; ``ASCEND_RT_VISIBLE_DEVICES`` chooses some of them by their numbers."""
    devices = sum(path.name[7:].isdecimal() for path in (machine.root / "dev").glob("davinci*"))
    variable = "ASCEND_RT_VISIBLE_DEVICES"
    chosen = machine.environment.get(variable)
    number = "1 or more" if wanted is None else str(wanted)
    if chosen is None:
        ok = devices >= 1 if wanted is None else devices == wanted
        fix = "install driver and firmware; in a container pass /dev/davinci* through; or choose another hardware="
        if wanted is not None and devices > wanted:
            fix = f"export {variable}={','.join(map(str, range(wanted)))}, or choose another hardware="
        return _item("npus", "NPUs", devices, ok, number, fix)
    ids = [part.strip() for part in chosen.split(",")]
    valid = all(each.isdecimal() and int(each) < devices for each in ids) and len({*ids}) == len(ids)
    ok = valid and (wanted is None or len(ids) == wanted)
    expected = f"{number} of the numbers 0 to {devices - 1}, each once" if devices else number
    fix = f"correct or unset {variable}, or choose another hardware="
    return _item("visible-npus", "NPUs", f"{devices}, of which {variable}={chosen}", ok, expected, fix)


def show_findings(findings: Sequence[Finding], *, only_problems: bool = False) -> bool:
    """Print findings, the problems first; return whether there is none."""
    found = sorted(findings, key=lambda finding: finding.ok)
    wrong = sum(not finding.ok for finding in found)
    for ok, problem in found[:wrong] if only_problems else found:
        value = problem.value if isinstance(problem.value, str) else show_value(problem.value)
        status, shown = "ok" if ok else "WRONG", f"found {'none' if value == 'null' else value}, "
        if not ok and problem.value is None:
            status, shown = "MISSING", ""
        print_text(f"{status} {problem.key}: {shown}{problem.expected}")
        if problem.fix:
            print_text(f"    {problem.fix}")
    print_text(f"{len(found) - wrong} of {len(found)} as wanted")
    return not wrong


def _run(machine: Machine, run: RunConfig, output: Path, plan: ClusterPlan | None) -> Iterator[Finding]:
    """The problems of ``coca-mindspeed check``, then the files of the run, disk space and host memory."""
    try:
        plan = make_plan(run) if plan is None else plan
        problems = [*plan.problems]
    except CocaError as error:
        problems = problems_of(error, "plan", "configuration")
    yield from (Finding(False, problem) for problem in (*problems, *missing_data(run), *missing_model(run)))
    if not problems:
        yield _item("plan", "configuration", "no problems", True, "no problems", "")
    if plan is not None:
        yield from _files(machine, run, plan, output)
        yield from _memory(machine, host_gib(plan.resolved)) if plan.memory else ()
    # Every node grades its share; the driver checks the gold answers.
    names, problem = (run.mindspeed_rl.get("rl_config") or {}).get("verifier_function") or (), ""
    named = (run.data.train, run.data.evaluate) if run.data.grader == "auto" else ()  # each record names a grader
    try:
        files = [Path(path) for path in named if path]
        check_verifier(names, run.data.grader, run.data.grader_options, files, run.method)
    except (CocaError, ImportError) as error:
        problem = str(error)
    shown = f"{', '.join(names)} ({run.data.grader})"
    yield _item("grader", "grader", shown, not problem, "can be built here", problem)


def _files(machine: Machine, run: RunConfig, plan: ClusterPlan, output: Path) -> Iterator[Finding]:
    """Megatron weights, and space for the checkpoints that are kept and for one that is being written."""
    r = plan.resolved
    if run.hardware.platform == "npu" or r.load:
        wanted, fix = f"Megatron weights for TP {r.tp}, PP {r.pp}", "bash launch/convert_weights.sh hf2mcore RUN"
        try:
            layout = checkpoint_layout(Path(str(r.load)))
            found, same = f"TP {layout.tp}, PP {layout.pp}", layout == (r.tp, r.pp)
        except CocaError as error:
            found, same, fix = str(r.load), False, f"{fix} ({error})"
        yield _item("weights", "weights", found, same, wanted, fix)
    most = most_checkpoints(r, plan.iterations, len(run.method.training_method.stages))
    more = max(1, most - sum(1 for _ in output.glob("stage*/checkpoints/iter_*")))
    needed, free = more * checkpoint_bytes(r), machine.disk_usage(output).free
    wanted = f"{needed / 1e9:.0f} GB or more for {more} checkpoints"
    fix = f"free space at {output}, choose another --output, or lower checkpoint.keep ({run.checkpoint.keep})"
    yield _item("disk", "free space", f"{free / 1e9:.0f} GB", free >= needed, wanted, fix)


def _memory(machine: Machine, needed: float) -> Iterator[Finding]:
    """A node's memory in GiB, as of the machine and of its container, and the space of Ray's object store."""
    kib = _read(machine.root / "proc" / "meminfo", r"^MemTotal:\s+(\d+) kB")
    wanted = f"{needed:.0f} GiB or more by estimate, without Ray's object store and the data"
    for code, key, size, absent, fix in (
        ("host-memory", "host memory", int(kib) * 1024 if kib else None, "unknown", "use larger or more nodes"),
        ("cgroup-memory", "cgroup memory limit", memory_limit(machine.root), "none", "docker run --memory"),
    ):
        shown = absent if size is None else f"{size / GIB:.0f} GiB"
        fix += ", or raise mindspeed_rl.generate_config.infer_tensor_parallel_size"
        yield _item(code, key, shown, size is None or size >= needed * GIB, wanted, fix)
    shm, wanted = machine.root / "dev" / "shm", f"{_OBJECT_STORE / 1e9:.0f} GB or more for Ray"
    size = machine.disk_usage(shm).total if shm.is_dir() else None
    fix = "enlarge it (docker run --shm-size=64g, or mount -o remount,size=64G /dev/shm): Ray would use /tmp instead"
    shown = "unknown" if size is None else f"{size / 1e9:.1f} GB"
    yield _item("shared-memory", "/dev/shm", shown, size is None or size >= _OBJECT_STORE, wanted, fix)


def _commit_of(checkout: Path) -> str | None:
    """The first digits of a checkout's commit; None if it is no repository, which another repository may contain."""
    command = ["git", f"--git-dir={checkout / '.git'}", "rev-parse", "--short=7", "HEAD"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    return None


def _is_build_of(version: str | None, wanted: str) -> bool:
    """Whether a version is the wanted one: ``2.5.1.post1`` and ``2.5.1+cpu`` are builds of 2.5.1, 2.5.10 is not.

    A wanted version that Python's rules do not know is compared as text.
    """
    for specifier in (f"=={wanted}.*", f"=={wanted}"):  # Python knows the first form for final releases only
        with suppress(InvalidSpecifier):
            return _matches(version, SpecifierSet(specifier, prereleases=True))
    return version == wanted


def _reaches(version: str | None, wanted: str) -> bool:
    """Whether a version is the wanted one or a newer one; see :func:`_matches`."""
    for text in (wanted, *re.findall(r"^[\d.]*\d", wanted)):
        with suppress(InvalidSpecifier):
            return _matches(version, SpecifierSet(f">={text}", prereleases=True))
    return version == wanted


def _matches(version: str | None, specifier: SpecifierSet) -> bool:
    """Of a version that Python's rules do not know, such as a driver's ``25.5.rc1.1``, the first numbers count."""
    for text in (version, *re.findall(r"^[\d.]*\d", version or "")):
        with suppress(InvalidVersion):
            return text is not None and specifier.contains(Version(text))
    return False


def _read(path: Path, pattern: str) -> str | None:
    with suppress(OSError):
        found = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        return found[1] if found else None
    return None
