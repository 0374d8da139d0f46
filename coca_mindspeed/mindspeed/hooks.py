"""The hooks of a manifest: applied to the MindSpeed-RL of this process, or written as a patch of its checkout.

A patch puts import and assignment lines behind the hooked definitions.  It only inserts lines, so the fingerprints stay
the same; :func:`apply` leaves its hooks out.
"""

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

from coca_mindspeed import __version__
from coca_mindspeed.upstream.manifest import Hook, Manifest, ManifestError, examine, module_path

manifest_of_process: dict[str, Manifest] = {}  # driver or worker -> the one that is in place


def apply(manifest: Manifest, root: Path, *, processes: tuple[str, ...], platform: str, rollout: str) -> None:
    """Verify every contract below ``root``, then put the hooks of these processes in place.

    Hooks of another platform or rollout engine are skipped, and those that the checkout contains as a patch.  Applying
    the same manifest again adds the hooks of further processes only.

    Raises ManifestError if a contract differs, a patch is incomplete, another manifest is in place, or Python imports
    another MindSpeed-RL than the one below ``root``.
    """
    if (other := next(iter(manifest_of_process.values()), manifest)) != manifest:
        raise ManifestError(f"release {other.release} is already hooked in this process, not {manifest.release}")
    processes = tuple(process for process in processes if process not in manifest_of_process)
    if not processes:
        return
    if differing := [finding for finding in examine(manifest, root) if finding.refused]:
        raise ManifestError(
            f"the MindSpeed-RL at {root} differs from release {manifest.release}: "
            + "; ".join(f"{finding.hook.target} ({finding.difference})" for finding in differing)
        )
    patched = applied_patch(manifest, root) is not None
    changes = [
        _change(hook, root)
        for hook in manifest.hooks
        if hook.acts
        and not (patched and is_patchable(hook))
        and hook.process in processes
        and hook.platform in (None, platform)
        and hook.rollout in (None, rollout)
    ]
    for change in changes:
        change()
    manifest_of_process.update(dict.fromkeys(processes, manifest))


def _change(hook: Hook, root: Path) -> Callable[[], None]:
    module_name, _, qualified = hook.target.partition(":")
    module = importlib.import_module(module_name)
    if not Path(str(module.__file__)).is_relative_to(root):
        raise ManifestError(
            f"{hook.target} was verified below {root}, but Python imports {module_name} from {module.__file__}"
        )
    path, _, name = qualified.rpartition(".")
    owner = _attribute(module, path)
    replacement_module, _, replacement_name = str(hook.replacement).partition(":")
    replacement = _attribute(importlib.import_module(replacement_module), replacement_name)
    if hook.kind == "register":
        registry = getattr(owner, name)
        return lambda: registry.__setitem__(hook.key, replacement)
    if hook.kind == "replace":
        return lambda: setattr(owner, name, replacement)
    # The value at that time: another hook may have wrapped it in the meantime.
    return lambda: setattr(owner, name, replacement(vars(owner)[name]))


def _attribute(value: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        value = getattr(value, name)
    return value


# Hooks that cannot be appended to their own module are appended to the actor's, which imports it:
# - a class at the end of a file without a final newline: no line can follow it;
# - a hook that would close an import cycle;
# - an entry of a registry in which later modules of MindSpeed-RL register the same key again.
_LATER_MODULE = "mindspeed_rl.workers.actor_hybrid_worker"
_IMPORTS_LATER_MODULE = "coca_mindspeed.mindspeed.stages.actor_worker"
_OURS = "coca_mindspeed"
_MARK = re.compile(rf"# {_OURS}(?: (\S+))?: hooks for release ")  # the first line of a block
_ACTS = re.compile(r"(?<!\w)_coca_\w")  # the lines of a block that are no comment


def is_patchable(hook: Hook) -> bool:
    """Whether a patch for NPUs contains the hook."""
    return hook.acts and hook.platform in (None, "npu") and hook.rollout in (None, "vllm")


def hook_lines(hook: Hook, module: str) -> list[str]:
    """The lines that apply a hook in ``module``, which is the target's or imports it."""
    ours, _, function = str(hook.replacement).partition(":")
    target_module, _, name = hook.target.partition(":")
    lines = [f"# {hook.reason}", f"from {ours} import {function} as _coca_{function}"]
    if module != target_module:
        owner = name.partition(".")[0]
        lines.append(f"from {target_module} import {owner} as _coca_{owner}")
        name = f"_coca_{name}"
    if hook.kind == "register":
        return [*lines, f'{name}["{hook.key}"] = _coca_{function}']
    made = f"_coca_{function}" if hook.kind == "replace" else f"_coca_{function}({name})"
    return [*lines, f"{name} = {made}"]


def export_patch(manifest: Manifest, root: Path, context: int = 3) -> str:
    """A unified diff for the files of the checkout in ``root``, which must match ``manifest`` and have no patch yet.

    ``git apply`` needs its ``context`` lines to find the place, or refuses.  With 0 it holds no line of MindSpeed-RL.
    Raises ManifestError if a definition stands where no line can be inserted behind it.
    """
    diff = []
    for module, block in _blocks(manifest, root).items():
        path = module_path(root, module)
        name, lines, at = path.relative_to(root).as_posix(), _lines_of(path), _insertion_line(path)
        before, after = lines[max(0, at - context) : at], lines[at : at + context]
        first, old = at - len(before) + 1, len(before) + len(after)
        # A hunk without old lines is counted from the line before it.
        diff += [f"--- a/{name}\n", f"+++ b/{name}\n"]
        diff += [f"@@ -{first if old else at},{old} +{first},{old + len(block)} @@\n"]
        diff += [f" {line}" for line in before]
        diff += [f"+{added}\n" for added in block]
        diff += [f" {line}" if line.endswith("\n") else f" {line}\n\\ No newline at end of file\n" for line in after]
    return "".join(diff)


def applied_patch(manifest: Manifest, root: Path) -> str | None:
    """The version of this project whose patch the checkout in ``root`` contains as a whole; None if it has no patch.

    Raises ManifestError if lines of a patch are missing, or are not those of this version's patch.
    """
    if not (found := patch_lines(manifest, root)):
        return None
    blocks = _blocks(manifest, root)
    wanted = {module_path(root, module): list(filter(_ACTS.search, block)) for module, block in blocks.items()}
    version = patch_version(found)
    acting = {path: list(filter(_ACTS.search, lines)) for path, lines in found.items()}
    differing = [path for path in sorted({*acting, *wanted}) if acting.get(path) != wanted.get(path)]
    if differing:
        wrong, holding = (
            ", ".join(str(path.relative_to(root)) for path in paths) for paths in (differing, sorted(found))
        )
        raise ManifestError(
            f"{root}: patched by {_OURS} {version}; expected the lines that {_OURS} {__version__} writes for release "
            f"{manifest.release}, or none, found others or a part of them in {wrong}; take the patch back (git apply "
            f"-R with the file that was applied, or git checkout {holding}), and apply the one that coca-mindspeed "
            "patches export writes, or none"
        )
    return version


def patch_lines(manifest: Manifest, root: Path) -> dict[Path, list[str]]:
    """The lines of patches, of any version, in the Python files of the packages that ``manifest`` hooks."""
    packages = sorted({hook.target.partition(":")[0].partition(".")[0] for hook in manifest.hooks})
    patched = {}
    for path in (path for package in packages for path in sorted((root / package).rglob("*.py"))):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if ours := [line for line in lines if _MARK.match(line) or _ACTS.search(line)]:
            patched[path] = ours
    return patched


def patch_version(patched: dict[Path, list[str]]) -> str:
    """The versions of this project that the lines found by :func:`patch_lines` name."""
    marks = (_MARK.match(line) for lines in patched.values() for line in lines)
    return ", ".join(sorted({mark[1] or "(none named)" for mark in marks if mark})) or "(none named)"


def _blocks(manifest: Manifest, root: Path) -> dict[str, list[str]]:
    """The lines to insert into each module."""
    hooks: defaultdict[str, list[str]] = defaultdict(list)
    for hook in filter(is_patchable, manifest.hooks):
        module = _module_to_patch(hook, root)
        hooks[module] += hook_lines(hook, module)
    mark = f"# {_OURS} {__version__}: hooks for release {manifest.release}"
    return {module: ["", "", mark, *lines] for module, lines in sorted(hooks.items())}


def _module_to_patch(hook: Hook, root: Path) -> str:
    module, _, name = hook.target.partition(":")
    if module.startswith("mindspeed_rl.models.") and str(hook.replacement).startswith(_IMPORTS_LATER_MODULE):
        return _LATER_MODULE
    if hook.kind == "register" and "." in name:
        return _LATER_MODULE
    path = module_path(root, module)
    last = ast.parse(path.read_text(encoding="utf-8")).body[-1]
    if getattr(last, "name", None) != name.partition(".")[0] or _ends_with_newline(path):
        return module
    if "." not in name or module == _LATER_MODULE:
        raise ManifestError(f"{hook.target}: {path} ends with it and has no final newline: no line can follow it")
    return _LATER_MODULE


def _insertion_line(path: Path) -> int:
    """The line after which a block is inserted: the end, but before ``if __name__`` and an end without a newline."""
    text = path.read_text(encoding="utf-8")
    *_, before, last = ast.parse(text).body
    if isinstance(last, ast.If) or not _ends_with_newline(path):
        assert before.end_lineno is not None
        return before.end_lineno
    return len(_lines_of(path))


def _lines_of(path: Path) -> list[str]:
    """The lines of a file with their ends, as git counts them."""
    return StringIO(path.read_bytes().decode("utf-8")).readlines()


def _ends_with_newline(path: Path) -> bool:
    return path.read_bytes().endswith(b"\n")
