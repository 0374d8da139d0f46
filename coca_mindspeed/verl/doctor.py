"""Readiness of a machine for a run on verl: its software against verl's documented stacks, its devices and its space.

Nothing here imports verl, torch or vLLM, so broken installations of them are reported too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from coca_mindspeed.errors import CocaError, problems_of
from coca_mindspeed.upstream.launch import WEIGHT_FORMAT
from coca_mindspeed.upstream.machine import (
    Finding,
    Machine,
    driver_and_cann,
    is_build_of,
    item,
    matches,
    network,
    npus,
    npus_in_use,
    open_files,
    ray_variables,
    shared_memory,
)
from coca_mindspeed.utils.text_formats import read_yaml
from coca_mindspeed.verl.plan import ComposedRun, compose_verl_run, plan_run
from coca_mindspeed.verl.requirements import ROLLOUT, VerlRun

_RELEASE = "0.9.1"
_GUIDE = "docs/verl.md, Software"
_NPU_PACKAGES = ("torch_npu", "vllm-ascend")
# pip takes torch of PyPI's vLLM and SGLang, so the order decides which torch stays.
_ORDER = {
    "npu": "pip replaces torch by the one that a package names: install vLLM (VLLM_TARGET_DEVICE=empty pip install .), "
    "then vLLM-Ascend, then torch and torch_npu, then verl without its extras",
    "cuda": f"pip replaces torch by the one that a package names: install verl[vllm]=={_RELEASE} (or sglang) last",
}


@dataclass(frozen=True)
class Stack:
    """A documented set of versions; ``driver`` and ``cann`` are empty where verl's page names none."""

    name: str
    accelerator: str  # npu or cuda
    engine: str
    python: str
    packages: Mapping[str, str]
    driver: str = ""
    cann: str = ""


def stacks() -> list[Stack]:
    names = {field.name for field in fields(Stack)}
    table: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("stacks.yaml"))
    return [Stack(name, **{key: value for key, value in row.items() if key in names}) for name, row in table.items()]


def stack_names() -> list[str]:
    return [stack.name for stack in stacks()]


def _devices(machine: Machine, pattern: str) -> int:
    return sum(path.name.removeprefix(pattern).isdecimal() for path in (machine.root / "dev").glob(f"{pattern}*"))


def find_stack(machine: Machine, engine: str = "vllm", name: str | None = None) -> Stack:
    """The named stack, else that of the machine's accelerator and the engine with the most versions as installed.

    A machine with NPUs is an Ascend machine; one without devices is so if torch_npu is installed.
    """
    if name is not None:
        return next(stack for stack in stacks() if stack.name == name)
    npu = _devices(machine, "davinci") > 0
    if not npu and not _devices(machine, "nvidia"):
        npu = machine.package_version("torch_npu") is not None
    of_kind = [stack for stack in stacks() if stack.accelerator == ("npu" if npu else "cuda")]
    fitting = [stack for stack in of_kind if stack.engine == engine] or of_kind
    return max(fitting, key=lambda stack: sum(_installed(machine, *pair)[1] for pair in stack.packages.items()))


def examine_verl_machine(
    machine: Machine,
    run: tuple[Path, Sequence[str]] | None = None,
    stack_name: str | None = None,
    output: Path | None = None,
    composed: ComposedRun | None = None,
) -> list[Finding]:
    """Examine a machine for a run on verl, its file and overrides, or for any.

    ``stack_name`` None: see :func:`find_stack`; ``output`` None is below ``runs``; ``composed`` is a run whose plan has
    no problems.
    """
    problems = []
    if composed is None and run is not None:
        try:
            composed = compose_verl_run(*run)
            problems = [Finding(False, problem) for problem in plan_run(composed).problems]
        except CocaError as error:
            problems = [Finding(False, problem) for problem in problems_of(error, "plan", "configuration")]
    resolved = None if composed is None else composed.run
    engine = "vllm" if resolved is None else str(resolved.value(f"{ROLLOUT}.name"))
    stack = find_stack(machine, engine, stack_name)
    nodes = 1 if resolved is None else int(resolved.value("trainer.nnodes"))
    return [
        *_software(machine, stack),
        *ray_variables(machine, several=nodes > 1),
        open_files(machine),
        *_hardware(machine, stack, resolved, several=nodes > 1),
        *problems,
        *(_space(machine, resolved, output or Path("runs")) if resolved is not None else ()),
    ]


def _installed(machine: Machine, name: str, wanted: str) -> tuple[str | None, bool]:
    version = machine.package_version(name)
    return version, is_build_of(version, wanted)


def _software(machine: Machine, stack: Stack) -> Iterator[Finding]:
    accepted = SpecifierSet(stack.python).contains(machine.python)
    fix = f"an environment of another Python ({_GUIDE})"
    yield item("python", "Python", machine.python, accepted, stack.python, fix)
    if stack.driver:
        yield from driver_and_cann(machine, stack.driver, stack.cann, matches)
    verl, right = _installed(machine, "verl", _RELEASE)
    yield item("package", "verl", verl, right, _RELEASE, f"pip install --no-deps verl=={_RELEASE} ({_GUIDE})")
    for name, wanted in stack.packages.items():
        version, right = _installed(machine, name, wanted)
        fix = (
            f"{_ORDER[stack.accelerator]} ({_GUIDE})"
            if name.startswith("torch")
            else f"install {name} {wanted} ({_GUIDE})"
        )
        yield item("package", name, version, right, f"{wanted} of {stack.name}", fix)
    if stack.accelerator == "cuda":
        for name in _NPU_PACKAGES:
            version = machine.package_version(name)
            fix = f"pip uninstall {name}: vLLM and verl would take this machine for one with NPUs"
            yield item("package", name, version, version is None, "absent on CUDA", fix)
        return
    if (npu := machine.package_version("torch_npu")) is not None:
        torch = (machine.package_version("torch") or "none").partition("+")[0]
        yield item(
            "torch-npu",
            "torch and torch_npu",
            f"{torch} and {npu}",
            is_build_of(npu, torch),
            "one version",
            _ORDER["npu"],
        )
    code, name, value, because = WEIGHT_FORMAT
    given = machine.environment.get(name)
    yield item(code, name, given, given in (None, value), f"{value} or unset: {because}", f"unset {name}")


def _hardware(machine: Machine, stack: Stack, run: VerlRun | None, *, several: bool) -> Iterator[Finding]:
    wanted = None if run is None else int(run.value("trainer.n_gpus_per_node"))
    if stack.accelerator == "npu":
        yield npus(machine, wanted, "trainer.n_gpus_per_node=")
        yield npus_in_use(machine)
        yield from network(machine, several=several)
    else:
        found = _devices(machine, "nvidia")
        chosen = machine.environment.get("CUDA_VISIBLE_DEVICES")
        found = found if chosen is None else min(found, len([part for part in chosen.split(",") if part.strip()]))
        fix = "docker run --gpus all; correct CUDA_VISIBLE_DEVICES, or set trainer.n_gpus_per_node"
        yield item("gpus", "GPUs", found, found >= (wanted or 1), f"{wanted or 1} or more", fix)
    yield shared_memory(machine)
    if several:
        port = int(machine.environment.get("RAY_PORT", 6766))
        fix = "set RAY_PORT to a free port on every node"
        yield item("port", "RAY_PORT", port, machine.port_is_free(port), "a free port on the head", fix)


def _space(machine: Machine, run: VerlRun, output: Path) -> Iterator[Finding]:
    """Space for the checkpoints that are kept and for one that is being written, by the size of the model's files.

    Estimated: verl's FSDP stores weights and both moments in float32, 12 bytes a parameter, of 2 in the model's files.
    """
    files = list(Path(str(run.value("actor_rollout_ref.model.path"))).glob("*.safetensors"))
    if not files or run.value("trainer.save_freq") <= 0:
        return
    one, kept = 6 * sum(file.stat().st_size for file in files), run.value("trainer.max_actor_ckpt_to_keep")
    number = (kept or 1) + 1
    free, wanted = machine.disk_usage(output).free, f"{number * one / 1e9:.0f} GB or more for {number} checkpoints"
    fix = f"free space at {output}, choose another --output, or set trainer.max_actor_ckpt_to_keep ({kept})"
    yield item("disk", "free space", f"{free / 1e9:.0f} GB", free >= number * one, f"{wanted}, estimated", fix)
