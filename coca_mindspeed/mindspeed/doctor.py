"""Readiness of a machine for a run on Ascend: each item with the value found, the value wanted and how to fix it.

Nothing here imports torch_npu, Ray or MindSpeed-RL, so broken installations of them are reported too.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coca_mindspeed.config.checks import missing_data, missing_model
from coca_mindspeed.config.model_size import GIB
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.prepare.filters import PromptCounter
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import read_records
from coca_mindspeed.errors import CocaError, Problem, problems_of
from coca_mindspeed.mindspeed.checks import layout_problems
from coca_mindspeed.mindspeed.machine import (
    CONVERTER,
    STACKS,
    UNPINNED,
    Machine,
    SoftwareStack,
    git_commit,
    is_version,
    megatron_version,
)
from coca_mindspeed.mindspeed.memory_estimate import checkpoint_bytes, host_gib
from coca_mindspeed.mindspeed.plan import ClusterPlan, make_plan
from coca_mindspeed.mindspeed.resolved_config import KEYS, ResolvedConfig
from coca_mindspeed.mindspeed.stages.verifiers import OWN_VERIFIER, try_verifier
from coca_mindspeed.mindspeed.start.cluster import wanted_cpus
from coca_mindspeed.mindspeed.start.driver import HOMES
from coca_mindspeed.mindspeed.start.inputs import try_template
from coca_mindspeed.mindspeed.start.settings import coca_settings
from coca_mindspeed.mindspeed.weights.checkpoints import checkpoint_layout
from coca_mindspeed.upstream.manifest import ManifestError, matching_manifest

_OPEN_FILES = 32768  # Ray opens a few hundred sockets per worker, and zmq one for each pair of ranks
_OBJECT_STORE = 10**10  # Ray's REQUIRE_SHM_SIZE_THRESHOLD: with less in /dev/shm, its object store is put into /tmp
# A token stands for at least one byte. Chat templates add a few dozen bytes per message, some a default system prompt.
_TEMPLATE_BYTES = 512
_SCRIPTS = "nothing to do for the launch scripts, which"
_GUIDE = "docs/ascend.md, 1. Software"  # vLLM and vLLM-Ascend are built from a commit there, not installed by a name


class Finding(NamedTuple):
    """An item, and the problem that it is if ``ok`` is false; ``ok`` is None if the item could not be examined."""

    ok: bool | None
    problem: Problem


def _item(code: str, key: str, found: Any, ok: object, wanted: str, fix: str) -> Finding:
    return Finding(bool(ok), Problem(code, key, found, f"wanted {wanted}", "" if ok else fix))


def _skipped(code: str, key: str, needs: str) -> Finding:
    return Finding(None, Problem(code, key, None, f"needs {needs}"))


def examine_machine(
    machine: Machine, run: RunConfig | None, release: str | None = None, output: Path | None = None
) -> list[Finding]:
    """Examine a machine for a run; without one, examine the requirements of every run.

    ``release`` None is that of ``MINDSPEED_RL_HOME``, or 2.3.0 if that is unknown; ``output`` None is below ``runs``.
    No item of an NPU is examined for the CPU shim.
    """
    checkout, found_release = _mindspeed_rl(machine)
    stack = STACKS[release or found_release or "2.3.0"]
    sources = [checkout, *_sources(machine, stack)]
    of_run = [] if run is None else [*run_findings(machine, run, output or Path("runs"))]
    if run is not None and run.hardware.platform == "host":
        return [*_cpu_packages(machine, run, stack), *sources, *of_run]
    findings = [*_cann(machine, stack), *_packages(machine, stack), *sources]
    findings += [*_limits(machine), *_network(machine, run), *_devices(machine, run)]
    return [*findings, *_converter(machine, run), *of_run]


def _cann(machine: Machine, stack: SoftwareStack) -> Iterator[Finding]:
    driver = machine.driver_version()
    new = driver is not None and _numbers(driver) >= _numbers(stack.driver)
    fix = "install Ascend-hdk-*-npu-driver, then the firmware"
    yield _item("driver", "NPU driver", driver, new, f"{stack.driver} or newer", fix)
    cann = machine.cann_version()
    scripts = ("cann/set_env.sh", "ascend-toolkit/set_env.sh") if cann is None else ()
    fix = _sourced(machine, f"CANN {stack.cann} toolkit, kernels", *scripts)
    yield _item("cann", "CANN", cann, cann and is_version(cann, stack.cann), stack.cann, fix)
    atb = machine.environment.get("ATB_HOME_PATH")
    fix = _sourced(machine, "Ascend-cann-nnal", "nnal/atb/set_env.sh")
    yield _item("atb", "ATB (NNAL)", atb, atb, "ATB_HOME_PATH set", fix)


def _sourced(machine: Machine, package: str, *scripts: str) -> str:
    """How to install a package of Ascend, or that the launch scripts source its script, if one is there."""
    if (script := machine.installed(*scripts)) is not None:
        return f"{_SCRIPTS} source {script}"
    return f"install {package}; source its set_env.sh (the launch scripts do)"


def _packages(machine: Machine, stack: SoftwareStack) -> Iterator[Finding]:
    for name, wanted in stack.packages.items():
        version = machine.package_version(name)
        fix = _GUIDE if name.startswith("vllm") else f"pip install {name}=={wanted} ({_GUIDE})"
        yield _item("package", name, version, version and is_version(version, wanted), wanted, fix)
    for name in UNPINNED:
        version = machine.package_version(name)
        yield _item("package", name, version, version, "any", "pip install -r $MINDSPEED_RL_HOME/requirements.txt")
    triton = machine.package_version("triton-ascend")
    fix = "pip uninstall triton-ascend: MindSpeed-RL forbids it beside vllm-ascend"
    yield _item("package", "triton-ascend", triton, triton is None, "absent", fix)


def _converter(machine: Machine, run: RunConfig | None) -> Iterator[Finding]:
    """Packages of ``launch/convert_weights.sh``; not needed once the run's weights exist."""
    converted = run is not None and Path(str(run.mindspeed_rl.get("actor_config", {}).get("load"))).is_dir()
    for name in CONVERTER:
        version = machine.package_version(name)
        fix = f"pip install --no-deps {name}, or convert in a separate environment (docs/ascend.md)"
        yield _item("converter", name, version, converted or version, "any, to convert weights", fix)


def _cpu_packages(machine: Machine, run: RunConfig, stack: SoftwareStack) -> Iterator[Finding]:
    for name in ("ray", "torch", "transformers"):
        version, fix = machine.package_version(name), "pip install -r requirements/mindspeed-host.txt (docs/port.md)"
        yield _item("package", name, version, version, "any, without an NPU", fix)
    if run.mindspeed_rl.get("coca", {}).get("rollout") == "vllm":
        version, wanted = machine.package_version("vllm"), stack.packages["vllm"]
        fix = f"use the environment of requirements/mindspeed-vllm.sh DIRECTORY {wanted}, or omit coca.rollout"
        same = version and is_version(version, wanted)
        yield _item("package", "vllm", version, same, f"{wanted}, its build for CPUs", fix)


def _mindspeed_rl(machine: Machine) -> tuple[Finding, str | None]:
    """MindSpeed-RL's checkout by its fingerprints, and its release if they match one."""
    value, wanted = machine.environment.get("MINDSPEED_RL_HOME", ""), f"unedited checkout of {' or '.join(STACKS)}"
    if not value:
        return _item("checkout", "MindSpeed-RL", None, False, wanted, "set MINDSPEED_RL_HOME"), None
    try:
        release = matching_manifest(Path(value)).release
    except ManifestError as error:
        return _item("checkout", "MindSpeed-RL", value, False, wanted, str(error)), None
    copies = [package for package in HOMES.values() if package != "mindspeed_rl" and (Path(value) / package).is_dir()]
    unused = f" (its copies of {', '.join(copies)} are not used)" if copies else ""
    return _item("checkout", "MindSpeed-RL", f"{release} at {value}{unused}", True, wanted, ""), release


def _sources(machine: Machine, stack: SoftwareStack) -> Iterator[Finding]:
    for variable, package in HOMES.items():
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
            wanted, commit = stack.mindspeed if package == "mindspeed" else stack.mindspeed_llm, git_commit(path)
            shown = commit[:7] if commit else "unknown: no git history"  # of a plain copy
            same, fix = commit is None or commit.startswith(wanted), f"git checkout {wanted[0]} in {value}"
            yield _item("commit", package, shown, same, " or ".join(wanted), fix)


def _limits(machine: Machine) -> Iterator[Finding]:
    preloaded = machine.environment.get("LD_PRELOAD", "").replace(":", " ").split()
    library, installed = next((path for path in preloaded if "jemalloc" in path), None), machine.jemalloc()
    fix = "apt install libjemalloc2 (yum install jemalloc); the launch scripts preload it"
    if installed is not None and library is None:
        fix = f"{_SCRIPTS} preload {installed}"
    yield _item("jemalloc", "jemalloc", library, library and Path(library).is_file(), "preloaded", fix)
    soft, hard = machine.open_files()
    fix = f"{_SCRIPTS} raise it" if hard >= _OPEN_FILES else "raise the hard limit in /etc/security/limits.conf"
    fix = f"ulimit -n {_OPEN_FILES} (hard limit {hard}); {fix}"
    yield _item("open-files", "open files", soft, soft >= _OPEN_FILES, f"{_OPEN_FILES} or more", fix)
    # On aarch64 OpenMP of scikit-learn finds no static thread-local storage if it is loaded late.
    if machine.architecture() == "aarch64" and (openmp := machine.libgomp_of_scikit_learn()) is not None:
        fix = f"{_SCRIPTS} preload it; otherwise: export LD_PRELOAD={openmp}:$LD_PRELOAD"
        wanted = f"{openmp} preloaded"
        yield _item("libgomp", "libgomp of scikit-learn", None, str(openmp) in preloaded, wanted, fix)


def _network(machine: Machine, run: RunConfig | None) -> Iterator[Finding]:
    known = machine.interfaces()
    for variable in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        name = machine.environment.get(variable)
        ok = (run is None or run.hardware.nodes == 1) if name is None else name in known
        fix = f"export {variable}=one of {', '.join(known)}, the interface that reaches the other nodes"
        yield _item("network", variable, name, ok, "an interface of this machine if the run has several nodes", fix)


def _devices(machine: Machine, run: RunConfig | None) -> Iterator[Finding]:
    found, wanted = machine.npus(), 1 if run is None else run.hardware.npus_per_node
    ok = found >= wanted if run is None else found == wanted
    fix = "install driver and firmware; in a container pass /dev/davinci* through; or choose another hardware="
    yield _item("npus", "NPUs", found, ok, f"{wanted}{' or more' if run is None else ''}", fix)
    if run is not None:
        # Ray gives every NPU its CPUs on the same node, and waits forever if there are too few.
        cpus = wanted_cpus(run.mindspeed_rl.get("rl_config") or {}, run.hardware.nodes)
        needed = cpus.per_npu * wanted + (cpus.others if run.hardware.nodes == 1 else 0)
        shown = f"{needed} or more ({cpus.per_npu} per NPU, {cpus.others} others)"
        fix = f"lower mindspeed_rl.rl_config.num_cpus_for_placement_group ({cpus.per_npu}), or allow more CPUs"
        yield _item("cpus", "CPUs", machine.cpus(), machine.cpus() >= needed, shown, fix)


def run_findings(machine: Machine, run: RunConfig, output: Path) -> Iterator[Finding]:
    """Examine the configuration, model, data, weights and disk space of a run."""
    plan: ClusterPlan | None = None
    try:
        plan = make_plan(run)
        problems = [*plan.problems]
    except CocaError as error:
        problems = problems_of(error, "plan", "configuration")
    yield from (Finding(False, problem) for problem in problems)
    if not problems:
        yield _item("plan", "configuration", "no problems", True, "no problems", "")
    absent = [*missing_data(run), *missing_model(run)]
    yield from (Finding(False, problem) for problem in absent)
    no_model = "model.path" in {problem.key for problem in absent}
    if run.model.path is not None and run.model.architecture is not None:
        if no_model:
            yield _skipped("end-of-text", "end of text", "model.path")
        else:
            if not any(problem.code == "shapes" for problem in problems):
                yield _item("shapes", "model.path", run.model.path, True, "the shapes of model.architecture", "")
            yield from _end_of_text(Path(run.model.path))
    if plan is not None:
        if run.hardware.platform == "npu" or run.mindspeed_rl["actor_config"].get("load"):
            yield _weights(run, plan)
        yield _disk(machine, run, plan, output)
        if plan.memory is not None:
            yield from _host_memory(machine, run, plan.resolved)
    named = {"data.train": run.data.train, "data.evaluate": run.data.evaluate}
    files = {key: Path(path) for key, path in named.items() if path is not None and Path(path).is_file()}
    missing = [key for key, path in named.items() if path is not None and key not in files]
    yield _skipped("grader", "grader", missing[0]) if missing else _grader(run, list(files.values()))
    if no_model:
        yield _skipped("template", "chat template", "model.path")
        yield from (_skipped("prompts", f"prompts of {key}", "model.path") for key in files)
    elif run.model.path is not None and files:
        yield _template(run, list(files.values()))
        for key, path in files.items():
            yield _prompts(run, key, path)


def _end_of_text(path: Path) -> Iterator[Finding]:
    """Whether a turn of the chat ends with the tokenizer's end of text.

    vLLM stops at the model's own end of a turn. MindSpeed-RL cuts a response behind the tokenizer's, which is also its
    padding: if they differ, a token that was never sampled is trained.
    """
    try:
        tokenizer = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # reported with the prompts
    end, template = tokenizer.get("eos_token"), tokenizer.get("chat_template")
    token = str(end.get("content") if isinstance(end, dict) else end)
    if (path / "chat_template.jinja").is_file():
        template = (path / "chat_template.jinja").read_text(encoding="utf-8")
    text = template if isinstance(template, str) else json.dumps(template or "", ensure_ascii=False)
    marks = {str(mark.get("content")) for mark in (tokenizer.get("added_tokens_decoder") or {}).values()}
    # A template of plain text, or none, ends its turns with nothing: only the model's own end of text is left.
    ends = token in text or "eos_token" in text or not any(mark in text for mark in marks)
    fix = f"in {path / 'tokenizer_config.json'} set eos_token to it (Llama 3: <|eot_id|>), as newer versions have it"
    yield _item("end-of-text", "end of text", token, ends, "the token that ends a turn of the chat template", fix)


def _weights(run: RunConfig, plan: ClusterPlan) -> Finding:
    tp, pp, path = plan.resolved.tp, plan.resolved.pp, str(run.mindspeed_rl["actor_config"].get("load"))
    wanted, fix = f"Megatron weights for TP {tp}, PP {pp}", "bash launch/convert_weights.sh hf2mcore RUN"
    try:
        layout = checkpoint_layout(Path(path))
    except CocaError as error:
        return _item("weights", "weights", path, False, wanted, f"{fix} ({error})")
    return _item(
        "weights", "weights", f"TP {layout.tp}, PP {layout.pp}", (layout.tp, layout.pp) == (tp, pp), wanted, fix
    )


def _disk(machine: Machine, run: RunConfig, plan: ClusterPlan, output: Path) -> Finding:
    """Space for the checkpoints that are kept at one time, and for the one that is being written."""
    present = sum(1 for _ in output.glob("stage*/checkpoints/iter_*"))
    more = max(1, run.checkpoint.keep * len(run.method.training_method.stages) + 1 - present)
    needed, free = more * checkpoint_bytes(plan.resolved), machine.free_bytes(output)
    wanted = f"{needed / 1e9:.0f} GB or more for {more} checkpoints"
    fix = f"free space at {output}, choose another --output, or lower checkpoint.keep ({run.checkpoint.keep})"
    return _item("disk", "free space", f"{free / 1e9:.0f} GB", free >= needed, wanted, fix)


def _host_memory(machine: Machine, run: RunConfig, resolved: ResolvedConfig) -> Iterator[Finding]:
    """A node's memory, as of the machine and of its container, and the space of Ray's object store."""
    needed, total, limit = host_gib(resolved), machine.memory_bytes(), machine.memory_limit()
    wanted = f"{needed:.0f} GiB or more by estimate, without Ray's object store and the data"
    for code, key, size, absent, fix in (
        ("host-memory", "host memory", total, "unknown", "use nodes with more memory, or more nodes"),
        ("cgroup-memory", "cgroup memory limit", limit, "none", "raise the limit (docker run --memory)"),
    ):
        ok = size is None or size >= needed * GIB
        shown = absent if size is None else f"{size / GIB:.0f} GiB"
        less = None if ok else _rollout_tp_within(resolved, (size or 0) / GIB, run.hardware.npus_per_node)
        yield _item(code, key, shown, ok, wanted, fix if less is None else f"{fix}, or set {less}")
    shm = machine.shared_memory_bytes()
    shown, wanted = "unknown" if shm is None else f"{shm / 1e9:.1f} GB", f"{_OBJECT_STORE / 1e9:.0f} GB or more for Ray"
    fix = "enlarge it (docker run --shm-size=64g, or mount -o remount,size=64G /dev/shm): Ray would use /tmp instead"
    yield _item("shared-memory", "/dev/shm", shown, shm is None or shm >= _OBJECT_STORE, wanted, fix)


def _rollout_tp_within(resolved: ResolvedConfig, gib: float, most: int) -> str | None:
    """The override of the smallest greater rollout TP with which the run needs at most ``gib`` of host memory."""
    for value in range(resolved.rollout_tp + 1, most + 1):
        varied = resolved.vary("rollout_tp", value)
        if host_gib(varied) <= gib and not layout_problems(varied):
            return f"{KEYS['rollout_tp']}={value} ({host_gib(varied):.0f} GiB)"
    return None


def _grader(run: RunConfig, files: list[Path]) -> Finding:
    names = list((run.mindspeed_rl.get("rl_config") or {}).get("verifier_function") or [])
    coca = run.mindspeed_rl.get("coca") or {}
    grader = coca.get("grader", "auto")
    shown, problem = f"{', '.join(names)} ({grader})" if OWN_VERIFIER in names else ", ".join(names), ""
    try:
        try_verifier(names, grader, coca.get("grading") or {}, files)
    except (CocaError, ImportError) as error:
        problem = str(error)
    return _item("grader", "grader", shown, not problem, "can be built here and can grade every record", problem)


def _template(run: RunConfig, files: list[Path]) -> Finding:
    """Whether the prompts of the chat template can be trained on; the driver checks the same."""
    section, problem = {**(run.mindspeed_rl.get("coca") or {}), "output_dir": "runs"}, ""
    try:
        try_template(Path(str(run.model.path)), files, coca_settings(section))
    except (CocaError, ImportError, RuntimeError) as error:  # the latter two: transformers itself is broken
        problem = str(error)
    wanted = "prompts with all messages, without an open thought and without today's date"
    return _item("template", "chat template", run.model.path, not problem, wanted, problem)


def _prompts(run: RunConfig, key: str, path: Path) -> Finding:
    """Whether every prompt fits: a longer one would end the run after its workers started."""
    limit, system_prompt = run.rollout.max_prompt_tokens, run.method.training_method.system_prompt
    wanted = f"at most {limit} tokens (rollout.max_prompt_tokens)"
    try:
        longer = too_long(path, Path(str(run.model.path)), system_prompt, limit, run.model.chat_template_kwargs)
    except (CocaError, ImportError, RuntimeError) as error:
        return _item("prompts", f"prompts of {key}", "not counted", False, wanted, str(error))
    record, tokens = max(longer.items(), key=lambda item: item[1], default=("", 0))
    found = f"{len(longer)} longer, the longest {tokens} (record {record!r})" if longer else "none longer"
    fix = f"data prepare ... --tokenizer {run.model.path} --max-tokens {limit}, or raise rollout.max_prompt_tokens"
    return _item("prompts", f"prompts of {key}", found, not longer, wanted, fix)


def too_long(
    path: Path, model: Path, system_prompt: str | None, limit: int, variables: Mapping[str, Any] | None = None
) -> dict[str, int]:
    """Ids and tokens of records whose prompt, chat template included, has more than ``limit`` tokens.

    The tokenizer in ``model`` is loaded only if a prompt has enough bytes to be too long.
    """
    counter: PromptCounter | None = None
    found = {}
    for record in read_records(path):
        messages = prompt_messages(record, system_prompt)
        if sum(len(message["content"].encode("utf-8")) for message in messages) + _TEMPLATE_BYTES > limit:
            counter = counter or PromptCounter(model, system_prompt, variables)
            if (tokens := counter(record)) > limit:
                found[record.id] = tokens
    return found


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"(\d+\.?)*", version)
    return tuple(map(int, re.findall(r"\d+", leading[0]))) if leading else ()
