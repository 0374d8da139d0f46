"""Manifests: the definitions of an upstream release that an engine changes or relies on, with their fingerprints.

A YAML file of ``patches/`` describes one release of a program of :data:`PROGRAMS`.  Nothing is applied to
sources that differ from a manifest in a contract; a changed text of another hook is a warning.
"""

import ast
import functools
import hashlib
import io
import textwrap
import tokenize
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pydantic.dataclasses
from pydantic import ConfigDict, TypeAdapter, ValidationError, model_validator

from coca_mindspeed.errors import CocaError, validation_problems
from coca_mindspeed.utils.console import print_note
from coca_mindspeed.utils.text_formats import YamlError, read_yaml

#: The package whose definitions a manifest lists, and what people call it.
PROGRAMS = {
    "mindspeed_rl": "MindSpeed-RL",
    "verl": "verl",
    "vllm": "vLLM",
    "vllm_ascend": "vLLM-Ascend",
    "slime": "slime",
    "trl": "TRL",
}


class ManifestError(CocaError):
    """A manifest cannot be used, or an installation matches none."""


_FIELDS = ConfigDict(extra="forbid", str_strip_whitespace=True, coerce_numbers_to_str=True)


@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=_FIELDS)
class Hook:
    """A definition of an upstream that this project changes or relies on.

    Attributes:
        target: ``package.module:Name`` or ``package.module:Class.method``.
        kind: ``replace``: another object in its place.  ``wrap``: a function around the original.  ``subclass``: a
            class derived from the original.  ``register``: an entry of a registry.  ``use``: only verified.
        process: ``driver`` (the training loop), ``worker`` (every other Ray process) or ``both``.
        sha256: of the normalised source.
        replacement: ``package.module:Name`` of ours; put in place for ``replace`` and ``register``, called with the
            original for ``wrap`` and ``subclass``.
        key: the registry's key, for ``register``.
        platform: only on this platform; None: on both.
        rollout: only with this rollout engine; None: with both.
        engine: only with this training engine of verl; None: with both.
        severity: of a difference.  ``contract``: our code repeats the definition or depends on its data, so another
            text is refused.  ``text``: our code only calls or extends it, so another text is a warning.
    """

    target: str
    kind: Literal["replace", "wrap", "subclass", "register", "use"]
    process: Literal["driver", "worker", "both"]
    reason: str
    sha256: str
    replacement: str | None = None
    key: str | None = None
    platform: Literal["npu", "host"] | None = None
    rollout: Literal["vllm", "transformers"] | None = None
    engine: Literal["fsdp", "megatron"] | None = None
    severity: Literal["contract", "text"] = "contract"

    @model_validator(mode="after")
    def _consistent(self) -> "Hook":
        if self.acts != (self.replacement is not None):
            raise ValueError(f"replacement: a hook of kind {self.kind} {'needs one' if self.acts else 'has none'}")
        if (self.kind == "register") != (self.key is not None):
            raise ValueError("key: belongs to hooks of kind register, and only to those")
        return self

    @property
    def acts(self) -> bool:
        return self.kind != "use"


@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=_FIELDS)
class SoftwareStack:
    """Versions that belong together.

    Attributes:
        driver: oldest NPU driver.
        cann: CANN; like every version below, ``2.5.1`` includes its builds.
        megatron: tag of Megatron-LM.
        mindspeed: accepted commits of MindSpeed, the recommended one first.
        mindspeed_llm: the same of MindSpeed-LLM.
        packages: Python packages by name.
    """

    driver: str
    cann: str
    megatron: str
    mindspeed: tuple[str, ...]
    mindspeed_llm: tuple[str, ...]
    packages: dict[str, str]


@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=_FIELDS)
class Manifest:
    """The hooks of one release, and the facts in which releases differ.

    Attributes:
        package: one of :data:`PROGRAMS`.
        stack: the versions that belong to a release of MindSpeed-RL, from its guide and requirements.
        uncut_sampling_environment: variables of Ray's workers where neither top_k nor top_p cuts the distribution.
    """

    path: Path
    release: str
    commit: str
    hooks: tuple[Hook, ...]
    package: Literal["mindspeed_rl", "verl", "vllm", "vllm_ascend", "slime", "trl"] = "mindspeed_rl"
    stack: SoftwareStack | None = None
    uncut_sampling_environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HookCheck:
    """A hook looked up in an installation; ``fingerprint`` is the one there, or why there is none."""

    hook: Hook
    fingerprint: str

    @property
    def matches(self) -> bool:
        return self.fingerprint == self.hook.sha256

    @property
    def refused(self) -> bool:
        """Whether a contract differs, or a definition is missing."""
        return not self.matches and (self.hook.severity == "contract" or len(self.fingerprint) != 64)

    @property
    def difference(self) -> str:
        """Both fingerprints, or why there is none."""
        if len(self.fingerprint) != 64:
            return self.fingerprint
        return f"expected {self.hook.sha256[:12]}, found {self.fingerprint[:12]}"


def manifest_directory() -> Path:
    """Return ``patches/`` of the repository or of the installed package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_patches"
    return installed if installed.is_dir() else package.parent / "patches"


def load_manifest(path: Path) -> Manifest:
    """Read and check a manifest; raises ManifestError with file and key."""
    try:
        content = read_yaml(path)
    except (OSError, YamlError) as error:
        raise ManifestError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ManifestError(f"{path}: expected a mapping with release, commit and hooks")
    try:
        return TypeAdapter(Manifest).validate_python({**content, "path": path})
    except ValidationError as error:
        raise ManifestError("\n".join(f"{path}: {problem}" for problem in validation_problems(error))) from error


@functools.cache
def _manifests_of(directory: Path) -> tuple[Manifest, ...]:
    return tuple(load_manifest(path) for path in sorted(directory.glob("*.yaml")))


def load_manifests(package: str = "mindspeed_rl") -> list[Manifest]:
    """The packaged manifests of one upstream, by name; a process reads them once."""
    return [manifest for manifest in _manifests_of(manifest_directory()) if manifest.package == package]


def manifest_of(release: str, package: str = "mindspeed_rl") -> Manifest:
    """The packaged manifest of a release; raises ``ManifestError`` if there is none."""
    known = {manifest.release: manifest for manifest in load_manifests(package=package)}
    if release not in known:
        raise ManifestError(f"no manifest for release {release!r} in {manifest_directory()}; known: {', '.join(known)}")
    return known[release]


def stack_of(release: str) -> SoftwareStack:
    """The versions that belong to a release of MindSpeed-RL; raises ``ManifestError`` if its manifest has none."""
    manifest = manifest_of(release)
    if manifest.stack is None:
        raise ManifestError(f"{manifest.path}: has no stack")
    return manifest.stack


def examine(manifest: Manifest, root: Path) -> list[HookCheck]:
    """Compare every hook with the sources below ``root``, without importing them."""
    findings = []
    for hook in manifest.hooks:
        try:
            findings.append(HookCheck(hook, fingerprint(root, hook.target)))
        except TargetError as error:
            findings.append(HookCheck(hook, str(error)))
    return findings


def closest_manifest(manifests: Iterable[Manifest], root: Path) -> tuple[Manifest, list[HookCheck]]:
    """The manifest with the fewest refused and then the fewest differing hooks below ``root``, and its examination."""
    examined = [(manifest, examine(manifest, root)) for manifest in manifests]
    return min(examined, key=lambda pair: (sum(f.refused for f in pair[1]), sum(not f.matches for f in pair[1])))


def matching_manifest(
    root: Path,
    manifests: Iterable[Manifest] | None = None,
    package: str = "mindspeed_rl",
    engine: Literal["fsdp", "megatron"] | None = None,
) -> Manifest:
    """Return the manifest that the ``package`` below ``root`` matches in every contract; warn of other differences.

    Hooks of another training engine than ``engine`` are left out; None: none are.  Raises ManifestError if there is no
    such manifest; the message names the closest release and each target that differs.
    """
    supported = load_manifests(package=package) if manifests is None else list(manifests)
    if not supported:
        raise ManifestError(f"no manifest found in {manifest_directory()}")
    manifest, examined = closest_manifest(supported, root)
    findings = [finding for finding in examined if engine is None or finding.hook.engine in (None, engine)]
    differing = [finding for finding in findings if not finding.matches]
    if any(finding.refused for finding in differing):
        raise ManifestError(
            f"the {PROGRAMS[package]} at {root} is not a supported one: {len(differing)} of {len(findings)} "
            f"hooked definitions differ from release {manifest.release}, the closest: "
            + "; ".join(f"{f.hook.target} ({f.difference}{'' if f.refused else '; a warning only'})" for f in differing)
            + f". Supported releases: {', '.join(f'{m.release} ({m.commit[:7]})' for m in supported)}. Take one of "
            "them unedited, or write a manifest for yours (coca-mindspeed patches fingerprint; docs/port.md)"
        )
    if differing:
        print_note(
            f"warning: the {PROGRAMS[package]} at {root} is not release {manifest.release}: {len(differing)} of "
            f"{len(findings)} hooked definitions have another text: {', '.join(f.hook.target for f in differing)}"
        )
    return manifest


def skeleton(manifest: Manifest, root: Path, release: str, commit: str) -> dict[str, Any]:
    """Return a manifest for another release: the hooks of ``manifest`` with the fingerprints found below ``root``.

    A missing target keeps its hook, with the reason in place of the fingerprint.
    """
    hooks = [
        {
            name: value
            for name, value in {**asdict(finding.hook), "sha256": finding.fingerprint}.items()
            if value not in (None, "contract")
        }
        for finding in examine(manifest, root)
    ]
    facts: dict[str, Any] = {} if manifest.package == "mindspeed_rl" else {"package": manifest.package}
    if manifest.stack is not None:  # to be edited by hand
        facts["stack"] = asdict(manifest.stack)
    return {**facts, "release": release, "commit": commit, "hooks": hooks}


class TargetError(CocaError):
    """A hook's target does not exist."""


def fingerprint(root: Path, target: str) -> str:
    """Return the SHA-256 of the normalised source of ``target`` below ``root``.

    Raises TargetError if the module or the definition does not exist or does not parse.
    """
    return hashlib.sha256(normalise_source(source_of(root, target)).encode("utf-8")).hexdigest()


def module_path(root: Path, module: str) -> Path:
    """The source file of a dotted module name below ``root``."""
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def source_of(root: Path, target: str) -> str:
    """Return the source of ``target``: a function, a class, an assignment or an import; raises TargetError."""
    module, _, qualified = target.partition(":")
    path = module_path(root, module)
    try:
        text = path.read_text(encoding="utf-8")
        body = ast.parse(text).body
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise TargetError(f"{target}: {path} cannot be read: {error}") from error
    node: ast.AST | None = None
    for name in qualified.split("."):
        node = next((statement for statement in body if name in _names_bound_by(statement)), None)
        if node is None:
            raise TargetError(f"{target}: {path} has no {name!r}")
        body = getattr(node, "body", [])
    assert isinstance(node, ast.stmt)
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def _names_bound_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    return set()


def normalise_source(source: str) -> str:
    """Remove comments, blank lines, common indentation and trailing white space.

    Strings, docstrings included, are kept: syntax trees print differently between Python versions, while comments are
    found at the same place by all of them.
    """
    source = textwrap.dedent(source.expandtabs())
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source + "\n").readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())
