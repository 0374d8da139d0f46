"""Everything a run on Ascend needs of a machine: what is found, what is wanted, and how to fix it.

Nothing here imports torch_npu, Ray or MindSpeed-RL, so it tells the truth about a machine on which they are broken;
transformers is imported where prompts may be too long, to count their tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coca_mindspeed.algorithm.rewards import training_method
from coca_mindspeed.config.plan import Plan, make_plan
from coca_mindspeed.config.schema import ArchitectureConfig, RunConfig
from coca_mindspeed.errors import CocaError
from coca_mindspeed.mindspeed.driver import HOMES
from coca_mindspeed.mindspeed.machine import Machine, git_commit, megatron_version
from coca_mindspeed.mindspeed.manifest import ManifestError, matching_manifest
from coca_mindspeed.mindspeed.megatron_checkpoint import checkpoint_layout
from coca_mindspeed.mindspeed.prompt_lengths import too_long
from coca_mindspeed.mindspeed.refusals import refusals
from coca_mindspeed.mindspeed.releases import CONVERTER, STACKS, UNPINNED, SoftwareStack, is_version
from coca_mindspeed.mindspeed.upstream_keys import keys_where_there_is_a_checkout

_OPEN_FILES = 32768  # Ray opens a few hundred sockets a worker, and zmq one for each pair of ranks
_HF_KEYS = {  # our name of a shape -> the key of config.json
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_groups": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "rope_theta": "rope_theta",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at; ``fix`` is empty where it is as wanted."""

    name: str
    found: str
    wanted: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        return not self.fix


def examine_machine(machine: Machine, run: RunConfig | None, release: str | None = None) -> list[Finding]:
    """Look at everything; without a run, only at what every run needs; for the host platform, at nothing of an NPU's.

    Args:
        machine: the machine.
        run: what is to run, or None.
        release: of MindSpeed-RL; None: the one that ``MINDSPEED_RL_HOME`` holds, or 2.3.0 where that says nothing.
    """
    checkout, found_release = _mindspeed_rl(machine)
    stack = STACKS[release or found_release or "2.3.0"]
    if run is not None and run.hardware.platform == "host":
        return [*_host_packages(machine), checkout, *_sources(machine, stack), *_run(machine, run)]
    findings = [*_cann(machine, stack), *_packages(machine, stack), checkout, *_sources(machine, stack)]
    findings += [*_host(machine), *_network(machine, run)]
    wanted = run.hardware.npus_per_node if run else 1
    findings.append(
        _finding(
            "NPUs",
            str(machine.npus()),
            f"{'' if run else 'at least '}{wanted}",
            machine.npus() == wanted if run else machine.npus() >= wanted,
            "install driver and firmware; in a container pass /dev/davinci* through; or choose another hardware=",
        )
    )
    findings += _converter(machine, run)
    return findings if run is None else [*findings, *_run(machine, run)]


def _finding(name: str, found: str | None, wanted: str, ok: bool, fix: str) -> Finding:
    return Finding(name, found or "nothing", wanted, "" if ok else fix)


def _cann(machine: Machine, stack: SoftwareStack) -> Iterator[Finding]:
    driver = machine.driver_version()
    ok = driver is not None and _numbers(driver) >= _numbers(stack.driver)
    yield _finding(
        "NPU driver", driver, f"{stack.driver} or newer", ok, "install Ascend-hdk-*-npu-driver, then firmware"
    )
    cann = machine.cann_version()
    fix = f"install CANN {stack.cann} (toolkit and kernels), then source its set_env.sh"
    if cann is None:
        fix = _sourced_by_the_scripts(machine.installed("ascend-toolkit/set_env.sh", "cann/set_env.sh"), fix)
    yield _finding("CANN", cann, stack.cann, cann is not None and is_version(cann, stack.cann), fix)
    atb = machine.environment.get("ATB_HOME_PATH")
    fix = "install Ascend-cann-nnal and source atb/set_env.sh"
    fix = _sourced_by_the_scripts(machine.installed("nnal/atb/set_env.sh"), fix)
    yield _finding("ATB (NNAL)", atb, "ATB_HOME_PATH set", bool(atb), fix)


def _sourced_by_the_scripts(script: Path | None, otherwise: str) -> str:
    """How to get variables that a launch script gets by itself."""
    if script is None:
        return f"{otherwise}; the launch scripts do the latter"
    return f"nothing to do for the launch scripts, which source {script}; to see what they see: source {script}"


def _packages(machine: Machine, stack: SoftwareStack) -> Iterator[Finding]:
    for name, wanted in stack.packages.items():
        version = machine.package_version(name)
        ok = version is not None and is_version(version, wanted)
        yield _finding(name, version, wanted, ok, f"install {name} {wanted}: docs/ascend.md, versions")
    for name in UNPINNED:
        version = machine.package_version(name)
        fix = "pip install -r $MINDSPEED_RL_HOME/requirements.txt"
        yield _finding(name, version, "any version", version is not None, fix)
    triton = machine.package_version("triton-ascend")
    fix = "pip uninstall triton-ascend: MindSpeed-RL forbids it beside vllm-ascend"
    yield _finding("triton-ascend", triton, "absent", triton is None, fix)


def _converter(machine: Machine, run: RunConfig | None) -> Iterator[Finding]:
    """What ``launch/convert_weights.sh`` needs; not asked for once the run's weights are there."""
    weights = None if run is None else str(run.mindspeed_rl.get("actor_config", {}).get("load"))
    converted = weights is not None and Path(weights).is_dir()
    for name in CONVERTER:
        version = machine.package_version(name)
        fix = f"pip install --no-deps {name}, or convert in an environment of its own (docs/ascend.md)"
        wanted = "any version, to convert weights"
        yield _finding(name, version, wanted, converted or version is not None, fix)


def _host_packages(machine: Machine) -> Iterator[Finding]:
    for name in ("ray", "torch", "transformers"):
        version = machine.package_version(name)
        fix = "pip install -r requirements/mindspeed-host.txt (docs/port.md)"
        yield _finding(name, version, "any, without an NPU", version is not None, fix)


def _mindspeed_rl(machine: Machine) -> tuple[Finding, str | None]:
    """MindSpeed-RL's checkout by its fingerprints, and its release if they match one."""
    value = machine.environment.get("MINDSPEED_RL_HOME", "")
    wanted = f"an unedited checkout of {' or '.join(STACKS)}"
    if not value:
        return _finding("MindSpeed-RL", None, wanted, False, "set MINDSPEED_RL_HOME"), None
    try:
        manifest = matching_manifest(Path(value))
    except ManifestError as error:
        return Finding("MindSpeed-RL", value, wanted, str(error)), None
    copies = [package for package in HOMES.values() if package != "mindspeed_rl" and (Path(value) / package).is_dir()]
    note = f"; not used: its copies of {', '.join(copies)}" if copies else ""
    return Finding("MindSpeed-RL", f"{manifest.release} at {value}{note}", wanted), manifest.release


def _sources(machine: Machine, stack: SoftwareStack) -> Iterator[Finding]:
    for variable, package in HOMES.items():
        if variable == "MINDSPEED_RL_HOME":
            continue
        value = machine.environment.get(variable, "")
        path = Path(value)
        if not value or not (path / package).is_dir():
            fix = f"set {variable} to a checkout that holds {package}/ (docs/ascend.md)"
            yield _finding(package, value, f"a checkout in {variable}", False, fix)
        elif package == "megatron":
            version = megatron_version(path)
            fix = f"git checkout core_v{stack.megatron} in {value}"
            yield _finding("Megatron-LM", version, stack.megatron, version == stack.megatron, fix)
        else:
            wanted = stack.mindspeed if package == "mindspeed" else stack.mindspeed_llm
            commit = git_commit(path)
            ok = commit is None or commit.startswith(wanted)  # a copy without its history cannot be told
            shown = commit[:7] if commit else "unknown: no git history"
            yield _finding(package, shown, wanted, ok, f"git checkout {wanted} in {value}")


def _host(machine: Machine) -> Iterator[Finding]:
    preload = machine.environment.get("LD_PRELOAD", "")
    library = next((part for part in preload.replace(":", " ").split() if "jemalloc" in part), None)
    ok = library is not None and Path(library).is_file()
    fix = "apt install libjemalloc2 (yum install jemalloc); the launch scripts preload it where it is installed"
    if (installed := machine.jemalloc()) is not None and library is None:
        fix = f"nothing to do for the launch scripts, which preload {installed}"
    yield _finding("jemalloc", library, "preloaded", ok, fix)
    limit = machine.open_files()
    fix = f"ulimit -n {_OPEN_FILES}, up to the hard limit of {machine.open_files_at_most()}"
    fix += (
        "; nothing to do for the launch scripts, which raise it"
        if machine.open_files_at_most() >= _OPEN_FILES
        else "; raise the hard limit in /etc/security/limits.conf first"
    )
    yield _finding("open files", str(limit), f"{_OPEN_FILES} or more", limit >= _OPEN_FILES, fix)


def _network(machine: Machine, run: RunConfig | None) -> Iterator[Finding]:
    nodes = run.hardware.nodes if run else 1
    for variable in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        name = machine.environment.get(variable)
        known = machine.interfaces()
        if name is None:
            fix = f"export {variable}=one of {', '.join(known)}, the one that reaches the other nodes"
            yield _finding(variable, "not set", "set, for several nodes", nodes == 1, fix)
        else:
            fix = f"export {variable}=one of {', '.join(known)}"
            yield _finding(variable, name, "an interface of this machine", name in known, fix)


def _run(machine: Machine, run: RunConfig) -> Iterator[Finding]:
    plan: Plan | None = None
    try:
        plan = make_plan(run)
        problems = "; ".join(refusals(run, plan))
        yield _finding("plan", "refused" if problems else "holds", "holds", not problems, problems)
    except CocaError as error:
        yield Finding("plan", "none", "holds", str(error))
    if run.model.path is not None and run.model.architecture is not None:
        yield _model(Path(run.model.path), run.model.architecture)
    if plan is not None and (run.hardware.platform == "npu" or run.mindspeed_rl["actor_config"].get("load")):
        yield _weights(run, plan)
    for key, value in (("data.train", run.data.train), ("data.evaluate", run.data.evaluate)):
        if value is not None:
            fix = f"coca-mindspeed data prepare (docs/data.md), or {key}=FILE"
            yield _finding(key, value, "a file", Path(value).is_file(), fix)
            if Path(value).is_file() and run.model.path is not None:
                yield _prompts(run, key, Path(value))
    yield from _keys(machine, run)


def _prompts(run: RunConfig, key: str, path: Path) -> Finding:
    """Whether every prompt fits: when the data set is built, a longer one ends the run, after its workers started."""
    limit = run.rollout.max_prompt_tokens
    name, wanted = f"prompts of {key}", f"at most {limit} tokens (rollout.max_prompt_tokens)"
    try:
        longer = too_long(path, Path(str(run.model.path)), training_method(run.method.name).system_prompt, limit)
    except (CocaError, ImportError, RuntimeError) as error:  # the latter two: transformers itself is broken
        return Finding(name, "not counted", wanted, str(error))
    if not longer:
        return Finding(name, "none longer", wanted)
    longest = max(longer, key=lambda prompt: prompt.tokens)
    found = f"{len(longer)} longer, the longest {longest.tokens} (record {longest.record!r})"
    fix = f"coca-mindspeed data prepare ... --tokenizer {run.model.path} --max-tokens {limit}"
    return Finding(name, found, wanted, f"{fix}; or a larger rollout.max_prompt_tokens")


def _keys(machine: Machine, run: RunConfig) -> Iterator[Finding]:
    try:
        keys = keys_where_there_is_a_checkout(machine.environment)
    except CocaError:
        return  # the finding on MindSpeed-RL's checkout says so
    if keys is not None:
        unknown = "; ".join(f"mindspeed_rl.{line}" for line in keys.unknown(run.mindspeed_rl))
        yield _finding("keys of MindSpeed-RL", "unknown ones" if unknown else "known", "known", not unknown, unknown)


def _model(path: Path, architecture: ArchitectureConfig) -> Finding:
    wanted = "a Hugging Face directory with the shapes of model.architecture"
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fix = f"download the model there, or model.path=DIR ({type(error).__name__})"
        return Finding("model.path", str(path), wanted, fix)
    differing = [
        f"{key} is {config.get(key)}, model.architecture.{name} {getattr(architecture, name)}"
        for name, key in _HF_KEYS.items()
        if config.get(key) != getattr(architecture, name)
    ]
    return _finding("model.path", str(path), wanted, not differing, "; ".join(differing))


def _weights(run: RunConfig, plan: Plan) -> Finding:
    wanted = f"Megatron weights for TP {plan.facts.tp}, PP {plan.facts.pp}"
    path = str(run.mindspeed_rl["actor_config"].get("load"))
    fix = "bash launch/convert_weights.sh hf2mcore RUN"
    try:
        layout = checkpoint_layout(Path(path))
    except CocaError as error:
        return Finding("weights", path, wanted, f"{error}; {fix}")
    found = f"{path}: TP {layout.tp}, PP {layout.pp}"
    return _finding("weights", found, wanted, (layout.tp, layout.pp) == (plan.facts.tp, plan.facts.pp), fix)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
