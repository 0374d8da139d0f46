"""Readiness of a machine for a run on Ascend: each item with the value found, the value wanted and how to fix it.

Nothing here imports torch_npu, Ray or MindSpeed-RL, so broken installations of them are reported too.
"""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from coca_mindspeed.config.checks import missing_data, missing_model
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import CocaError, problems_of
from coca_mindspeed.mindspeed.checkpoints import checkpoint_layout
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.hooks import applied_patch
from coca_mindspeed.mindspeed.plan import ClusterPlan, checkpoint_bytes, host_gib, make_plan, most_checkpoints
from coca_mindspeed.mindspeed.start.driver import CHECKOUTS
from coca_mindspeed.mindspeed.start.verifiers import check_verifier
from coca_mindspeed.upstream.machine import (
    Finding,
    Machine,
    driver_and_cann,
    is_build_of,
    item,
    network,
    npus,
    npus_in_use,
    open_files,
    ray_variables,
    read_line,
    shared_memory,
)
from coca_mindspeed.upstream.manifest import SoftwareStack, load_manifests, matching_manifest, stack_of
from coca_mindspeed.utils.process import GIB, memory_limit

_DOCK_CPUS = 10  # reserved by GRPOTransferDock on one node


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
    start = None if run is None else ClusterRun(run) if plan is None else plan.start
    checkout, found_release = _mindspeed_rl(machine)
    stack = stack_of(release or found_release or "2.3.0")
    findings = [
        checkout,
        *_sources(machine, stack),
        *ray_variables(machine, several=run is not None and run.hardware.nodes > 1),
    ]
    if run is None or run.hardware.platform == "npu":
        findings = [*_software(machine, stack), *findings, *_hardware(machine, start)]
    return findings if start is None else [*findings, *_run(machine, start, output or Path("runs"), plan)]


def _software(machine: Machine, stack: SoftwareStack) -> Iterator[Finding]:
    guide = "docs/ascend.md, 2. Software"
    yield from driver_and_cann(machine, stack.driver, stack.cann, is_build_of)
    for name, wanted in stack.packages.items():
        version = machine.package_version(name)
        # From commits, and from wheels: pip's torch for Linux is a CUDA build.
        by_hand = name.startswith(("vllm", "torch", "apex"))
        fix = guide if by_hand else f"pip install {name}=={wanted} ({guide})"
        yield item("package", name, version, is_build_of(version, wanted), wanted, fix)
    triton, fix = machine.package_version("triton-ascend"), "pip uninstall triton-ascend: MindSpeed-RL forbids it"
    yield item("package", "triton-ascend", triton, triton is None, "absent", fix)


def _mindspeed_rl(machine: Machine) -> tuple[Finding, str | None]:
    """MindSpeed-RL's checkout by its fingerprints and its patch, and its release if they match one."""
    home, wanted = (
        machine.environment.get("MINDSPEED_RL_HOME"),
        f"checkout of {' or '.join(releases())}, unedited or patched as a whole",
    )
    if not home:
        return item("checkout", "MindSpeed-RL", None, False, wanted, "set MINDSPEED_RL_HOME"), None
    release = None
    try:
        manifest = matching_manifest(Path(home))
        release = manifest.release
        patch = applied_patch(manifest, Path(home))
    except CocaError as error:
        return item("checkout", "MindSpeed-RL", home, False, wanted, str(error)), release
    copies = [each for each in CHECKOUTS.values() if each != "mindspeed_rl" and (Path(home) / each).is_dir()]
    unused = f" (its copies of {', '.join(copies)} are not used)" if copies else ""
    patched = "" if patch is None else f", patched by coca_mindspeed {patch}"
    found = f"{release} at {home}{patched}{unused}"
    return item("checkout", "MindSpeed-RL", found, True, wanted, ""), release


def _sources(machine: Machine, stack: SoftwareStack) -> Iterator[Finding]:
    for variable, versions, tag in (
        ("MEGATRON_HOME", (stack.megatron,), f"core_v{stack.megatron}"),
        ("MINDSPEED_HOME", stack.mindspeed, stack.mindspeed[0]),
        ("MINDSPEED_LLM_HOME", stack.mindspeed_llm, stack.mindspeed_llm[0]),
    ):
        home, package = machine.environment.get(variable), CHECKOUTS[variable]
        if not home or not (Path(home) / package).is_dir():
            fix = f"set {variable} to a checkout that holds {package}/ (docs/ascend.md)"
            yield item("checkout", package, home or None, False, f"a checkout in {variable}", fix)
            continue
        if package == "megatron":
            file = Path(home) / "megatron" / "core" / "package_info.py"
            parts = (read_line(file, rf"^{name}\s*=\s*(\d+)") for name in ("MAJOR", "MINOR", "PATCH"))
            key, found = "Megatron-LM", ".".join(part or "?" for part in parts)
        else:  # a plain copy has no git history
            key, found = package, _commit_of(Path(home)) or "unknown: no git history"
        same = found.startswith((*versions, "unknown"))
        yield item("commit", key, found, same, " or ".join(versions), f"git checkout {tag} in {home}")


def _hardware(machine: Machine, start: ClusterRun | None) -> Iterator[Finding]:
    """Devices, and the limits of this machine that a run meets."""
    environment, (nodes, per_node) = machine.environment, (1, 1)
    if start is not None:
        nodes, per_node = start.run.hardware.nodes, start.run.hardware.npus_per_node
    preloaded = environment.get("LD_PRELOAD", "").replace(":", " ").split()
    jemalloc = next((path for path in preloaded if "jemalloc" in path), None)
    fix = "apt install libjemalloc2 (yum install jemalloc); the launch scripts preload it where it is installed"
    yield item("jemalloc", "jemalloc", jemalloc, jemalloc and Path(jemalloc).is_file(), "preloaded", fix)
    yield open_files(machine)
    yield from network(machine, several=nodes > 1)
    setting = f"{start.key('hardware.npus_per_node')}=" if start is not None and start.native else "hardware="
    yield npus(machine, None if start is None else per_node, setting)
    yield npus_in_use(machine)
    if start is not None:
        # Ray gives every NPU its CPUs on the same node, and waits forever if there are too few.  The others may all be
        # on this node: the transfer dock, the task of train, a rule reward per node, and the advantage task.
        rl = start.run.mindspeed_rl.get("rl_config") or {}
        per_npu, task = int(rl.get("num_cpus_for_placement_group", 8)), int(rl.get("num_cpus_for_local_task", 1))
        others, cpus = _DOCK_CPUS + 1 + (nodes + 1) * task, machine.cpus
        wanted = f"{per_npu * per_node + others} or more ({per_npu} per NPU, {others} others)"
        key = start.key("mindspeed_rl.rl_config.num_cpus_for_placement_group")
        fix = f"lower {key} ({per_npu}), or allow more CPUs"
        yield item("cpus", "CPUs", cpus, cpus >= per_npu * per_node + others, wanted, fix)


def _run(machine: Machine, start: ClusterRun, output: Path, plan: ClusterPlan | None) -> Iterator[Finding]:
    """The problems of ``coca-mindspeed check``, then the files of the run, disk space and host memory."""
    run, launched = start.run, plan is not None  # and so the gold answers are checked by the launch
    try:
        plan = make_plan(run) if plan is None else plan
        problems = [*plan.problems]
    except CocaError as error:
        problems = problems_of(error, "plan", "configuration")
    missing = (problem._replace(key=start.key(problem.key)) for problem in missing_model(run))
    # The node that trains reads the records for all.
    data = missing_data(run, start.key) if machine.environment.get("NODE_RANK", "0") == "0" else ()
    yield from (Finding(False, problem) for problem in (*problems, *data, *missing))
    if not problems:
        yield item("plan", "configuration", "no problems", True, "no problems", "")
    if plan is not None:
        yield from _files(machine, plan, output)
        yield from _memory(machine, start, host_gib(plan.resolved)) if plan.memory else ()
    # Every node grades its share; the launch checks the gold answers.
    names, problem = (run.mindspeed_rl.get("rl_config") or {}).get("verifier_function") or (), ""
    by_record = run.data.grader == "auto" and not launched  # each record names a grader
    try:
        check_verifier(start, [record for records in start.records for record in records] if by_record else [])
    except (CocaError, ImportError) as error:
        problem = str(error)
    shown = f"{', '.join(names)} ({run.data.grader})"
    yield item("grader", "grader", shown, not problem, "can be built here", problem)


def _files(machine: Machine, plan: ClusterPlan, output: Path) -> Iterator[Finding]:
    """Megatron weights, and space for the checkpoints that are kept and for one that is being written."""
    r, run = plan.resolved, plan.start.run
    if run.hardware.platform == "npu" or r.load:
        wanted, fix = f"Megatron weights for TP {r.tp}, PP {r.pp}", "bash launch/convert_weights.sh hf2mcore RUN"
        try:
            layout = checkpoint_layout(Path(str(r.load)))
            found, same = f"TP {layout.tp}, PP {layout.pp}", layout == (r.tp, r.pp)
        except CocaError as error:
            found, same, fix = str(r.load), False, f"{fix} ({error})"
        yield item("weights", "weights", found, same, wanted, fix)
    most = most_checkpoints(r, plan.iterations, plan.start.stages)
    more = max(1, most - sum(1 for _ in output.glob("stage*/checkpoints/iter_*")))
    needed, free = more * checkpoint_bytes(r), machine.disk_usage(output).free
    wanted = f"{needed / 1e9:.0f} GB or more for {more} checkpoints"
    keep = f"{plan.start.key('checkpoint.keep')} ({run.checkpoint.keep})"
    fix = f"free space at {output}, choose another --output, or lower {keep}"
    yield item("disk", "free space", f"{free / 1e9:.0f} GB", free >= needed, wanted, fix)


def _memory(machine: Machine, start: ClusterRun, needed: float) -> Iterator[Finding]:
    """A node's memory in GiB, as of the machine and of its container, and the space of Ray's object store."""
    kib = read_line(machine.root / "proc" / "meminfo", r"^MemTotal:\s+(\d+) kB")
    wanted = f"{needed:.0f} GiB or more by estimate, without Ray's object store and the data"
    for code, key, size, absent, fix in (
        ("host-memory", "host memory", int(kib) * 1024 if kib else None, "unknown", "use larger or more nodes"),
        ("cgroup-memory", "cgroup memory limit", memory_limit(machine.root), "none", "docker run --memory"),
    ):
        shown = absent if size is None else f"{size / GIB:.0f} GiB"
        fix += f", or raise {start.key('mindspeed_rl.generate_config.infer_tensor_parallel_size')}"
        yield item(code, key, shown, size is None or size >= needed * GIB, wanted, fix)
    yield shared_memory(machine)


def _commit_of(checkout: Path) -> str | None:
    """The first digits of a checkout's commit; None if it is no repository, which another repository may contain."""
    command = ["git", f"--git-dir={checkout / '.git'}", "rev-parse", "--short=7", "HEAD"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    return None
