"""Everything a run on Ascend needs of a machine: what is found, what is wanted, and how to fix it.

Nothing here imports torch_npu, Ray or MindSpeed-RL, so it tells the truth about a machine on which they are broken.
"""

from collections.abc import Iterator
from pathlib import Path

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.mindspeed.doctor.machine import Diagnosis, Machine, finding, git_commit, megatron_version
from coca_mindspeed.mindspeed.doctor.run_checks import cpus, findings_of_run
from coca_mindspeed.mindspeed.start.driver import HOMES
from coca_mindspeed.mindspeed.start.releases import CONVERTER, STACKS, UNPINNED, SoftwareStack, is_version
from coca_mindspeed.upstream.manifest import ManifestError, matching_manifest

_OPEN_FILES = 32768  # Ray opens a few hundred sockets a worker, and zmq one for each pair of ranks


def examine_machine(
    machine: Machine, run: RunConfig | None, release: str | None = None, output: Path | None = None
) -> list[Diagnosis]:
    """Look at everything; without a run, only at what every run needs; for the host platform, at nothing of an NPU's.

    Args:
        machine: the machine.
        run: what is to run, or None.
        release: of MindSpeed-RL; None: the one that ``MINDSPEED_RL_HOME`` holds, or 2.3.0 where that says nothing.
        output: where the run writes; None: below ``runs``.
    """
    checkout, found_release = _mindspeed_rl(machine)
    stack = STACKS[release or found_release or "2.3.0"]
    if run is not None and run.hardware.platform == "host":
        packages = [*_host_packages(machine), *_vllm_without_an_npu(machine, run, stack)]
        return [*packages, checkout, *_sources(machine, stack), *findings_of_run(machine, run, output)]
    findings = [*_cann(machine, stack), *_packages(machine, stack), checkout, *_sources(machine, stack)]
    findings += [*_host(machine), *_libgomp(machine), *_network(machine, run)]
    wanted = run.hardware.npus_per_node if run else 1
    findings.append(
        finding(
            "NPUs",
            str(machine.npus()),
            f"{'' if run else 'at least '}{wanted}",
            machine.npus() == wanted if run else machine.npus() >= wanted,
            "install driver and firmware; in a container pass /dev/davinci* through; or choose another hardware=",
        )
    )
    findings += _converter(machine, run)
    return findings if run is None else [*findings, cpus(machine, run), *findings_of_run(machine, run, output)]


def _cann(machine: Machine, stack: SoftwareStack) -> Iterator[Diagnosis]:
    driver = machine.driver_version()
    ok = driver is not None and _numbers(driver) >= _numbers(stack.driver)
    yield finding(
        "NPU driver", driver, f"{stack.driver} or newer", ok, "install Ascend-hdk-*-npu-driver, then firmware"
    )
    cann = machine.cann_version()
    fix = f"install CANN {stack.cann} (toolkit and kernels), then source its set_env.sh"
    if cann is None:
        fix = _sourced_by_the_scripts(machine.installed("cann/set_env.sh", "ascend-toolkit/set_env.sh"), fix)
    yield finding("CANN", cann, stack.cann, cann is not None and is_version(cann, stack.cann), fix)
    atb = machine.environment.get("ATB_HOME_PATH")
    fix = "install Ascend-cann-nnal and source atb/set_env.sh"
    fix = _sourced_by_the_scripts(machine.installed("nnal/atb/set_env.sh"), fix)
    yield finding("ATB (NNAL)", atb, "ATB_HOME_PATH set", bool(atb), fix)


def _sourced_by_the_scripts(script: Path | None, otherwise: str) -> str:
    """How to get variables that a launch script gets by itself."""
    if script is None:
        return f"{otherwise}; the launch scripts do the latter"
    return f"nothing to do for the launch scripts, which source {script}; to see what they see: source {script}"


def _packages(machine: Machine, stack: SoftwareStack) -> Iterator[Diagnosis]:
    for name, wanted in stack.packages.items():
        version = machine.package_version(name)
        ok = version is not None and is_version(version, wanted)
        yield finding(name, version, wanted, ok, f"install {name} {wanted}: docs/ascend.md, versions")
    for name in UNPINNED:
        version = machine.package_version(name)
        fix = "pip install -r $MINDSPEED_RL_HOME/requirements.txt"
        yield finding(name, version, "any version", version is not None, fix)
    triton = machine.package_version("triton-ascend")
    fix = "pip uninstall triton-ascend: MindSpeed-RL forbids it beside vllm-ascend"
    yield finding("triton-ascend", triton, "absent", triton is None, fix)


def _converter(machine: Machine, run: RunConfig | None) -> Iterator[Diagnosis]:
    """What ``launch/convert_weights.sh`` needs; not asked for once the run's weights are there."""
    weights = None if run is None else str(run.mindspeed_rl.get("actor_config", {}).get("load"))
    converted = weights is not None and Path(weights).is_dir()
    for name in CONVERTER:
        version = machine.package_version(name)
        fix = f"pip install --no-deps {name}, or convert in an environment of its own (docs/ascend.md)"
        wanted = "any version, to convert weights"
        yield finding(name, version, wanted, converted or version is not None, fix)


def _host_packages(machine: Machine) -> Iterator[Diagnosis]:
    for name in ("ray", "torch", "transformers"):
        version = machine.package_version(name)
        fix = "pip install -r requirements/mindspeed-host.txt (docs/port.md)"
        yield finding(name, version, "any, without an NPU", version is not None, fix)


def _vllm_without_an_npu(machine: Machine, run: RunConfig, stack: SoftwareStack) -> Iterator[Diagnosis]:
    if run.mindspeed_rl.get("coca", {}).get("rollout") == "vllm":
        version, wanted = machine.package_version("vllm"), stack.packages["vllm"]
        ok = version is not None and is_version(version, wanted)
        script = f"requirements/mindspeed-vllm.sh DIRECTORY {wanted}"
        fix = f"run in the environment that {script} makes, or leave coca.rollout out"
        yield finding("vllm", version, f"{wanted}, its build for CPUs", ok, fix)


def _mindspeed_rl(machine: Machine) -> tuple[Diagnosis, str | None]:
    """MindSpeed-RL's checkout by its fingerprints, and its release if they match one."""
    value = machine.environment.get("MINDSPEED_RL_HOME", "")
    wanted = f"an unedited checkout of {' or '.join(STACKS)}"
    if not value:
        return finding("MindSpeed-RL", None, wanted, False, "set MINDSPEED_RL_HOME"), None
    try:
        manifest = matching_manifest(Path(value))
    except ManifestError as error:
        return Diagnosis("MindSpeed-RL", value, wanted, str(error)), None
    copies = [package for package in HOMES.values() if package != "mindspeed_rl" and (Path(value) / package).is_dir()]
    note = f"; not used: its copies of {', '.join(copies)}" if copies else ""
    return Diagnosis("MindSpeed-RL", f"{manifest.release} at {value}{note}", wanted), manifest.release


def _sources(machine: Machine, stack: SoftwareStack) -> Iterator[Diagnosis]:
    for variable, package in HOMES.items():
        if variable == "MINDSPEED_RL_HOME":
            continue
        value = machine.environment.get(variable, "")
        path = Path(value)
        if not value or not (path / package).is_dir():
            fix = f"set {variable} to a checkout that holds {package}/ (docs/ascend.md)"
            yield finding(package, value, f"a checkout in {variable}", False, fix)
        elif package == "megatron":
            version = megatron_version(path)
            fix = f"git checkout core_v{stack.megatron} in {value}"
            yield finding("Megatron-LM", version, stack.megatron, version == stack.megatron, fix)
        else:
            wanted = stack.mindspeed if package == "mindspeed" else stack.mindspeed_llm
            commit = git_commit(path)
            ok = commit is None or commit.startswith(wanted)  # a copy without its history cannot be told
            shown = commit[:7] if commit else "unknown: no git history"
            yield finding(package, shown, " or ".join(wanted), ok, f"git checkout {wanted[0]} in {value}")


def _host(machine: Machine) -> Iterator[Diagnosis]:
    preload = machine.environment.get("LD_PRELOAD", "")
    library = next((part for part in preload.replace(":", " ").split() if "jemalloc" in part), None)
    ok = library is not None and Path(library).is_file()
    fix = "apt install libjemalloc2 (yum install jemalloc); the launch scripts preload it where it is installed"
    if (installed := machine.jemalloc()) is not None and library is None:
        fix = f"nothing to do for the launch scripts, which preload {installed}"
    yield finding("jemalloc", library, "preloaded", ok, fix)
    limit = machine.open_files()
    fix = f"ulimit -n {_OPEN_FILES}, up to the hard limit of {machine.open_files_at_most()}"
    fix += (
        "; nothing to do for the launch scripts, which raise it"
        if machine.open_files_at_most() >= _OPEN_FILES
        else "; raise the hard limit in /etc/security/limits.conf first"
    )
    yield finding("open files", str(limit), f"{_OPEN_FILES} or more", limit >= _OPEN_FILES, fix)


def _libgomp(machine: Machine) -> Iterator[Diagnosis]:
    """On aarch64 scikit-learn's OpenMP finds no room among the static thread-local storage if it is loaded late."""
    if machine.architecture() != "aarch64" or (library := machine.libgomp_of_scikit_learn()) is None:
        return
    preloaded = str(library) in machine.environment.get("LD_PRELOAD", "").replace(":", " ").split()
    fix = f"nothing to do for the launch scripts, which preload it; elsewhere: export LD_PRELOAD={library}:$LD_PRELOAD"
    yield finding(
        "libgomp of scikit-learn", str(library) if preloaded else "not preloaded", "preloaded", preloaded, fix
    )


def _network(machine: Machine, run: RunConfig | None) -> Iterator[Diagnosis]:
    nodes = run.hardware.nodes if run else 1
    for variable in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        name = machine.environment.get(variable)
        known = machine.interfaces()
        if name is None:
            fix = f"export {variable}=one of {', '.join(known)}, the one that reaches the other nodes"
            yield finding(variable, "not set", "set, for several nodes", nodes == 1, fix)
        else:
            fix = f"export {variable}=one of {', '.join(known)}"
            yield finding(variable, name, "an interface of this machine", name in known, fix)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
