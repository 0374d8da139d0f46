"""Which definitions of an upstream release an engine changes or leans on, and the fingerprints that they must have.

One YAML file of ``patches/`` describes one release of MindSpeed-RL, verl or vLLM.  Nothing is ever applied to sources
that differ from a manifest: a changed upstream is a loud stop.
"""

import importlib.resources
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coca_mindspeed.errors import CocaError
from coca_mindspeed.upstream.fingerprint import TargetError, fingerprint
from coca_mindspeed.utils.text_formats import YamlError, read_yaml

#: ``replace``: another object stands there.  ``wrap``: a function around the original.  ``subclass``: a class made
#: from the original.  ``register``: an entry of a registry.  ``use``: relied upon as it is, and only verified.
KINDS = ("replace", "wrap", "subclass", "register", "use")
PROCESSES = ("driver", "worker", "both")
PLATFORMS = ("npu", "host")
ROLLOUTS = ("vllm", "transformers")
_REQUIRED = ("target", "kind", "process", "reason", "sha256")
_OPTIONAL = ("replacement", "key", "platform", "rollout")

#: The package whose definitions a manifest lists, and what people call it.
PROGRAMS = {"mindspeed_rl": "MindSpeed-RL", "verl": "verl", "vllm": "vLLM"}


class ManifestError(CocaError):
    """A manifest cannot be used, or an installation does not match any."""


@dataclass(frozen=True, slots=True)
class Hook:
    """One definition of an upstream that this project changes or relies upon.

    Attributes:
        target: ``package.module:Name`` or ``package.module:Class.method``.
        kind: one of :data:`KINDS`.
        process: ``driver`` where the training loop runs, ``worker`` in every other Ray process, or ``both``.
        reason: why, for people.
        sha256: of the normalised source.
        replacement: ``package.module:Name`` of ours; for ``replace`` and ``register`` it is put there, for ``wrap``
            and ``subclass`` it is called with the original and its result is put there.
        key: the registry's key, for ``register``.
        platform: only on this platform, or None for both.
        rollout: only where this engine samples, or None for both.
    """

    target: str
    kind: str
    process: str
    reason: str
    sha256: str
    replacement: str | None = None
    key: str | None = None
    platform: str | None = None
    rollout: str | None = None

    @property
    def acts(self) -> bool:
        return self.kind != "use"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The hooks of one release."""

    path: Path
    release: str
    commit: str
    hooks: tuple[Hook, ...]
    package: str = "mindspeed_rl"


@dataclass(frozen=True, slots=True)
class HookCheck:
    """One hook looked up in an installation; ``found`` is its fingerprint there, or why there is none."""

    hook: Hook
    found: str

    @property
    def matches(self) -> bool:
        return self.found == self.hook.sha256


def manifest_directory() -> Path:
    """``patches/`` of the repository, or where an installed package carries it."""
    if importlib.util.find_spec("coca_mindspeed._patches") is not None:
        return Path(str(importlib.resources.files("coca_mindspeed._patches")))
    return Path(__file__).parents[2] / "patches"


def load_manifest(path: Path) -> Manifest:
    """Read and check one manifest.

    Raises:
        ManifestError: naming the file and the key.
    """
    try:
        content = read_yaml(path)
    except (OSError, YamlError) as error:
        raise ManifestError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict) or set(content) - {"package"} != {"release", "commit", "hooks"}:
        raise ManifestError(
            f"{path}: expected the keys release, commit and hooks, and package where it is not MindSpeed-RL"
        )
    package = str(content.get("package", "mindspeed_rl"))
    if package not in PROGRAMS:
        raise ManifestError(f"{path}: package should be one of {', '.join(PROGRAMS)}, found {package!r}")
    hooks = tuple(_hook(entry, f"{path}: hooks[{index}]") for index, entry in enumerate(content["hooks"]))
    return Manifest(path, str(content["release"]), str(content["commit"]), hooks, package)


def _hook(entry: Any, where: str) -> Hook:
    if not isinstance(entry, dict):
        raise ManifestError(f"{where}: expected a mapping, found {entry!r}")
    if missing := [name for name in _REQUIRED if name not in entry]:
        raise ManifestError(f"{where}: {missing[0]!r} is missing")
    if unknown := sorted(set(entry) - {*_REQUIRED, *_OPTIONAL}):
        raise ManifestError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join((*_REQUIRED, *_OPTIONAL))}")
    hook = Hook(**{name: str(value).strip() for name, value in entry.items()})
    choices = [("kind", hook.kind, KINDS), ("process", hook.process, PROCESSES)]
    if hook.platform is not None:
        choices.append(("platform", hook.platform, PLATFORMS))
    if hook.rollout is not None:
        choices.append(("rollout", hook.rollout, ROLLOUTS))
    for name, value, known in choices:
        if value not in known:
            raise ManifestError(f"{where}: {name} should be one of {', '.join(known)}, found {value!r}")
    if hook.acts != (hook.replacement is not None):
        raise ManifestError(f"{where}: a hook of kind {hook.kind} {'needs' if hook.acts else 'has no'} replacement")
    if (hook.kind == "register") != (hook.key is not None):
        raise ManifestError(f"{where}: 'key' belongs to hooks of kind register, and only to those")
    return hook


def load_manifests(directory: Path | None = None, package: str = "mindspeed_rl") -> list[Manifest]:
    """All manifests of one upstream in a directory, by name; default: those that this package carries."""
    directory = manifest_directory() if directory is None else directory
    manifests = [load_manifest(path) for path in sorted(directory.glob("*.yaml"))]
    return [manifest for manifest in manifests if manifest.package == package]


def examine(manifest: Manifest, root: Path) -> list[HookCheck]:
    """Compare every hook with the sources below ``root``, without importing them."""
    findings = []
    for hook in manifest.hooks:
        try:
            findings.append(HookCheck(hook, fingerprint(root, hook.target)))
        except TargetError as error:
            findings.append(HookCheck(hook, str(error)))
    return findings


def matching_manifest(
    root: Path, manifests: Iterable[Manifest] | None = None, package: str = "mindspeed_rl"
) -> Manifest:
    """The manifest that the ``package`` below ``root`` matches in every hook.

    Raises:
        ManifestError: none does; the message names the closest release and each target that differs.
    """
    known = load_manifests(package=package) if manifests is None else list(manifests)
    if not known:
        raise ManifestError(f"no manifest found in {manifest_directory()}")
    examined = [(manifest, [f for f in examine(manifest, root) if not f.matches]) for manifest in known]
    manifest, differing = min(examined, key=lambda pair: len(pair[1]))
    if differing:
        raise ManifestError(
            f"the {PROGRAMS[package]} at {root} is not a supported one: {len(differing)} of {len(manifest.hooks)} "
            f"hooked definitions differ from release {manifest.release}, the closest: "
            + "; ".join(describe(finding) for finding in differing)
            + f". Supported releases: {', '.join(f'{m.release} ({m.commit[:7]})' for m in known)}. Take one of "
            "them unedited, or write a manifest for yours (coca-mindspeed patches fingerprint; docs/port.md)"
        )
    return manifest


def describe(finding: HookCheck) -> str:
    """One finding that does not match, in one phrase."""
    found = finding.found
    return (
        f"{finding.hook.target} (expected {finding.hook.sha256[:12]}, found {found[:12]})"
        if len(found) == 64
        else found
    )


def skeleton(manifest: Manifest, root: Path, release: str, commit: str) -> dict[str, Any]:
    """A manifest for another release: the hooks of ``manifest`` with the fingerprints found below ``root``.

    A target that is not there keeps its hook, with the reason in place of a fingerprint: it has to be thought about.
    """
    hooks = []
    for finding in examine(manifest, root):
        hook = finding.hook
        entry = {"target": hook.target, "kind": hook.kind}
        for name in ("key", "replacement", "process", "platform", "rollout", "reason"):
            if (value := getattr(hook, name)) is not None:
                entry[name] = value
        hooks.append({**entry, "sha256": finding.found})
    package = {} if manifest.package == "mindspeed_rl" else {"package": manifest.package}
    return {**package, "release": release, "commit": commit, "hooks": hooks}
