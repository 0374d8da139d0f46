"""Facts of a machine that starts a run, and findings on what it has: shared by the doctors of both upstreams.

Nothing here imports an upstream, so broken installations of them are reported too.
"""

import importlib.metadata
import os
import platform
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

from coca_mindspeed.errors import Problem, show_value
from coca_mindspeed.upstream.nodes import means_this_machine
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.directories import nearest_directory
from coca_mindspeed.utils.process import usable_cpus

_LONGEST_TMPDIR = 39  # bytes: paths of Ray's sockets have at most 107, 68 of them below it
_LOOPBACK = "lo"
_OBJECT_STORE = 10**10  # Ray's REQUIRE_SHM_SIZE_THRESHOLD: with less in /dev/shm, its object store is put into /tmp
_OPEN_FILES = 32768  # Ray opens a few hundred sockets per worker, and zmq one for each pair of ranks


def _package_version(name: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _disk_usage(path: Path) -> Any:
    """Total and free bytes at ``path``, or at its nearest existing parent."""
    return shutil.disk_usage(nearest_directory(path))


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


def _port_is_free(port: int) -> bool:
    with suppress(OSError), socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
        return True
    return False


def _npu_smi() -> str:
    """The tables of ``npu-smi info``; empty if it cannot be run."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["npu-smi", "info"], capture_output=True, text=True, timeout=60, check=True).stdout
    return ""


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
    python: str = field(default_factory=platform.python_version)
    port_is_free: Callable[[int], bool] = _port_is_free
    npu_smi: Callable[[], str] = _npu_smi


class Finding(NamedTuple):
    """One checked item; a problem unless ``ok``."""

    ok: bool
    problem: Problem


def item(code: str, key: str, value: Any, ok: object, wanted: str, fix: str) -> Finding:
    return Finding(bool(ok), Problem(code, key, value, f"wanted {wanted}", "" if ok else fix))


def ray_variables(machine: Machine, *, several: bool) -> Iterator[Finding]:
    """Variables that would keep the processes of Ray from each other."""
    environment = machine.environment
    variable = "RAY_TMPDIR" if "RAY_TMPDIR" in environment else "TMPDIR"
    directory, wanted = (
        environment.get(variable, "/tmp"),
        f"at most {_LONGEST_TMPDIR} bytes, for Ray's sockets in it",
    )
    short = len(os.fsencode(directory)) <= _LONGEST_TMPDIR
    yield item("tmpdir", variable, directory, short, wanted, "export RAY_TMPDIR=/tmp")
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    proxy = next((name for name, value in environment.items() if name.lower() in proxies and value), None)
    head = environment.get("MASTER_ADDR") or "127.0.0.1"
    nodes = dict.fromkeys(filter(None, (head, machine.address_towards(head) if several else None)))
    past = environment.get("no_proxy") or environment.get("NO_PROXY")
    ok = proxy is None or all(_bypasses(past or "", address) for address in nodes)
    wanted = f"the addresses of all nodes ({', '.join(nodes)}) if a proxy is exported ({proxy or 'none'})"
    fix = f"export no_proxy={','.join(filter(None, (past, *nodes)))} on every node, or unset {proxy}"
    yield item("proxy", "no_proxy", past, ok, wanted, fix)


def _bypasses(no_proxy: str, host: str) -> bool:
    """Whether ``no_proxy`` names a host, by name, suffix, address or network."""
    for part in filter(None, (part.strip().lower() for part in no_proxy.split(","))):
        if part == "*" or f".{host.lower()}".endswith(f".{part.lstrip('.')}"):
            return True
        with suppress(ValueError):
            if "/" in part and ip_address(host) in ip_network(part, strict=False):
                return True
    return False


def open_files(machine: Machine) -> Finding:
    hard, fix = machine.open_files, "raise the hard limit in /etc/security/limits.conf"
    enough = hard == resource.RLIM_INFINITY or hard >= _OPEN_FILES
    return item("open-files", "open files", hard, enough, f"a hard limit of {_OPEN_FILES} or more", fix)


def shared_memory(machine: Machine) -> Finding:
    """The space of Ray's object store."""
    shm, wanted = machine.root / "dev" / "shm", f"{_OBJECT_STORE / 1e9:.0f} GB or more for Ray"
    size = machine.disk_usage(shm).total if shm.is_dir() else None
    fix = "enlarge it (docker run --shm-size=64g, or mount -o remount,size=64G /dev/shm): Ray would use /tmp instead"
    shown = "unknown" if size is None else f"{size / 1e9:.1f} GB"
    return item("shared-memory", "/dev/shm", shown, size is None or size >= _OBJECT_STORE, wanted, fix)


def driver_and_cann(
    machine: Machine, driver: str, cann: str, accepted: Callable[[str | None, str], bool]
) -> Iterator[Finding]:
    """The NPU's driver, of a version or newer, and CANN, whose version ``accepted`` compares with the wanted one."""
    environment = machine.environment
    version = read_line(machine.root / "usr/local/Ascend/driver/version.info", r"^Version=(\S+)")
    new, fix = reaches(version, driver), "install Ascend-hdk-*-npu-driver, then the firmware"
    yield item("driver", "NPU driver", version, new, f"{driver} or newer", fix)
    home = environment.get("ASCEND_TOOLKIT_HOME") or environment.get("ASCEND_HOME_PATH")
    names = ("*/ascend_toolkit_install.info", "ascend_toolkit_install.info", "version.cfg") if home else ()
    pattern = r"^(?:\S*running_)?version=\[?(?:\d+:)?([^\]\s]+)"
    versions = (read_line(path, pattern) for name in names for path in sorted(Path(str(home)).glob(name)))
    toolkit = next(filter(None, versions), None)
    fix = "install {}, and source its set_env.sh (the launch scripts source it where it is installed)"
    fix_cann = fix.format(f"CANN {cann} toolkit and ops")
    yield item("cann", "CANN", toolkit, accepted(toolkit, cann), cann, fix_cann)
    atb = environment.get("ATB_HOME_PATH")
    yield item("atb", "ATB (NNAL)", atb, atb, "ATB_HOME_PATH set", fix.format("Ascend-cann-nnal"))


def network(machine: Machine, *, several: bool) -> Iterator[Finding]:
    """The interfaces by which HCCL and Gloo find the other nodes; CANN lets ``HCCL_IF_IP`` win over a name.

    And no rank table: HCCL would number the ranks by it, and Ray numbers them otherwise.
    """
    environment, interfaces = machine.environment, machine.interfaces
    variable = "RANK_TABLE_FILE"
    table, fix = environment.get(variable), f"unset {variable} (operators of Kubernetes export it)"
    yield item("rank-table", variable, table, not table, "unset: Ray numbers the ranks", fix)
    where = "of this machine that reaches the other nodes" if several else "of this machine"
    fix = f"export {{}}=one of {', '.join(name for name in interfaces if name != _LOOPBACK)}"
    if address := environment.get("HCCL_IF_IP"):
        ok = machine.owns_address(address) and not (several and means_this_machine(address))
        yield item("network", "HCCL_IF_IP", address, ok, f"an address {where}", "correct or unset HCCL_IF_IP")
    else:
        variable = "HCCL_SOCKET_IFNAME"
        value = environment.get(variable)
        found = hccl_interfaces(value or "", interfaces)
        ok = any(name != _LOOPBACK or not several for name in found) if value else not several
        yield item("network", variable, value, ok, f"an interface {where}", fix.format(variable))
    variable = "GLOO_SOCKET_IFNAME"
    value = environment.get(variable)
    found = (value or "").split(",")  # Gloo opens a device on each
    ok = {*found} <= {*interfaces} and not (several and _LOOPBACK in found) if value else not several
    yield item("network", variable, value, ok, f"an interface {where}", fix.format(variable))


def hccl_interfaces(pattern: str, names: Sequence[str]) -> list[str]:
    """The interfaces that a value of ``HCCL_SOCKET_IFNAME`` names.

    ``eth,enp`` names those that begin so, ``=eth0,eth1`` exactly those; ``^eth`` and ``^=eth0`` name all others.
    """
    others, exactly = pattern.startswith("^"), pattern.removeprefix("^").startswith("=")
    listed = pattern.removeprefix("^").removeprefix("=").split(",")
    if not all(listed):
        return []
    return [name for name in names if (name in listed if exactly else name.startswith(tuple(listed))) != others]


def npus(machine: Machine, wanted: int | None, setting: str = "hardware=") -> Finding:
    """The devices of the machine; ``ASCEND_RT_VISIBLE_DEVICES`` chooses some of them by their numbers.

    ``setting`` is the key of a run that decides how many there should be.
    """
    devices = sum(path.name[7:].isdecimal() for path in (machine.root / "dev").glob("davinci*"))
    variable = "ASCEND_RT_VISIBLE_DEVICES"
    chosen = machine.environment.get(variable)
    number = "1 or more" if wanted is None else str(wanted)
    if chosen is None:
        ok = devices >= 1 if wanted is None else devices == wanted
        fix = f"install driver and firmware; in a container pass /dev/davinci* through; or choose another {setting}"
        if wanted is not None and devices > wanted:
            fix = f"export {variable}={','.join(map(str, range(wanted)))}, or choose another {setting}"
        return item("npus", "NPUs", devices, ok, number, fix)
    ids = [part.strip() for part in chosen.split(",")]
    valid = all(each.isdecimal() and int(each) < devices for each in ids) and len({*ids}) == len(ids)
    ok = valid and (wanted is None or len(ids) == wanted)
    expected = f"{number} of the numbers 0 to {devices - 1}, each once" if devices else number
    fix = f"correct or unset {variable}, or choose another {setting}"
    return item("visible-npus", "NPUs", f"{devices}, of which {variable}={chosen}", ok, expected, fix)


_CHIP = re.compile(r"^\|\s*(\d+)(?:\s+\d+)?\s*\|\s*[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:", re.MULTILINE)
_NPU = re.compile(r"^\|\s*(\d+)\s+\S*[A-Za-z]\S*\s*\|", re.MULTILINE)
_PROCESS = re.compile(r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|", re.MULTILINE)


def npus_in_use(machine: Machine) -> Finding:
    """Processes on the devices of a run by ``npu-smi info``, which may not show those of other containers.

    ``ASCEND_RT_VISIBLE_DEVICES`` counts the chips of the first table, in its order.
    """
    text = machine.npu_smi()
    chips: list[tuple[str, str]] = []
    npu = ""
    for line in text.splitlines():
        if chip := _CHIP.match(line):
            chips.append((npu, chip[1]))
        elif name := _NPU.match(line):
            npu = name[1]
    chosen = machine.environment.get("ASCEND_RT_VISIBLE_DEVICES")
    if chosen is not None:
        numbers = {part.strip() for part in chosen.split(",")}
        chips = [chip for number, chip in enumerate(chips) if str(number) in numbers]
    busy: dict[tuple[str, str], list[str]] = {}
    for number, chip, process in _PROCESS.findall(text):
        if (number, chip) in chips:
            busy.setdefault((number, chip), []).append(process)
    shown = "; ".join(f"NPU {npu} chip {chip}: {', '.join(pids)}" for (npu, chip), pids in busy.items())
    fix = "end these processes (of an earlier run: kill PID), or choose other NPUs by ASCEND_RT_VISIBLE_DEVICES"
    value = shown or ("no process" if chips else "unknown")
    return item("npus-in-use", "processes on NPUs", value, not busy, "no process", fix)


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


def is_build_of(version: str | None, wanted: str) -> bool:
    """Whether a version is the wanted one: ``2.5.1.post1`` and ``2.5.1+cpu`` are builds of 2.5.1, 2.5.10 is not.

    A wanted version that Python's rules do not know is compared as text.
    """
    for specifier in (f"=={wanted}.*", f"=={wanted}"):  # Python knows the first form for final releases only
        with suppress(InvalidSpecifier):
            return _fits(version, SpecifierSet(specifier, prereleases=True))
    return version == wanted


def reaches(version: str | None, wanted: str) -> bool:
    """Whether a version is the wanted one or a newer one; see :func:`_matches`."""
    for text in (wanted, *re.findall(r"^[\d.]*\d", wanted)):
        with suppress(InvalidSpecifier):
            return _fits(version, SpecifierSet(f">={text}", prereleases=True))
    return version == wanted


def matches(version: str | None, specifier: str) -> bool:
    """Whether a version, of a driver or CANN too, fits a specifier such as ``>=8.5.0``."""
    return _fits(version, SpecifierSet(specifier, prereleases=True))


def _fits(version: str | None, specifier: SpecifierSet) -> bool:
    """Of a version that Python's rules do not know, such as a driver's ``25.5.rc1.1``, the first numbers count."""
    for text in (version, *re.findall(r"^[\d.]*\d", version or "")):
        with suppress(InvalidVersion):
            return text is not None and specifier.contains(Version(text))
    return False


def read_line(path: Path, pattern: str) -> str | None:
    with suppress(OSError):
        found = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        return found[1] if found else None
    return None
