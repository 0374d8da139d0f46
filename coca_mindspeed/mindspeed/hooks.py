"""The hooks of a manifest: applied to the MindSpeed-RL of this process, or written as a patch of its checkout.

A patch puts import and assignment lines behind the hooked definitions.  It only inserts lines and has no context, so it
holds no line of MindSpeed-RL's code, and the fingerprints stay the same; :func:`apply` leaves its hooks out.
"""

import ast
import importlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coca_mindspeed.upstream.manifest import Hook, Manifest, ManifestError, examine, module_path

_applied: dict[str, Manifest] = {}  # by process


def apply(manifest: Manifest, root: Path, *, processes: tuple[str, ...], platform: str, rollout: str) -> None:
    """Verify every contract below ``root``, then put the hooks of these processes in place.

    Hooks of another platform or rollout engine are skipped, and those that the checkout contains as a patch.  Applying
    the same manifest again adds the hooks of further processes only.

    Raises ManifestError if a contract differs, a patch is incomplete, another manifest is in place, or Python imports
    another MindSpeed-RL than the one below ``root``.
    """
    if (other := next(iter(_applied.values()), manifest)) != manifest:
        raise ManifestError(f"release {other.release} is already hooked in this process, not {manifest.release}")
    processes = tuple(process for process in processes if process not in _applied)
    if not processes:
        return
    if differing := [finding for finding in examine(manifest, root) if finding.refused]:
        raise ManifestError(
            f"the MindSpeed-RL at {root} differs from release {manifest.release}: "
            + "; ".join(f"{finding.hook.target} ({finding.difference})" for finding in differing)
        )
    in_patch = patched_hooks(manifest, root)
    changes = [
        _change(hook, root)
        for hook in manifest.hooks
        if hook.acts
        and hook not in in_patch
        and hook.process in processes
        and hook.platform in (None, platform)
        and hook.rollout in (None, rollout)
    ]
    for change in changes:
        change()
    _applied.update(dict.fromkeys(processes, manifest))


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


def export_patch(manifest: Manifest, root: Path) -> str:
    """A unified diff without context for the checkout in ``root``, which must be the manifest's release.

    Raises ManifestError if a definition stands where no line can be inserted behind it.
    """
    blocks: defaultdict[str, list[str]] = defaultdict(list)
    for hook in filter(is_patchable, manifest.hooks):
        module = _module_to_patch(hook, root)
        blocks[module] += hook_lines(hook, module)
    diff = []
    for module, block in sorted(blocks.items()):
        path = module_path(root, module)
        line = _insertion_line(path)
        lines = ["", "", f"# {_OURS}: hooks for release {manifest.release}", *block]
        name = path.relative_to(root).as_posix()
        diff += [f"--- a/{name}", f"+++ b/{name}", f"@@ -{line},0 +{line + 1},{len(lines)} @@"]
        diff += [f"+{added}" for added in lines]
    return "".join(f"{line}\n" for line in diff)


def patched_hooks(manifest: Manifest, root: Path) -> set[Hook]:
    """The hooks that the checkout in ``root`` contains as a patch: all that a patch can contain, or none.

    Raises ManifestError if it holds a part of a patch, or one of another version.
    """
    modules = {hook: _module_to_patch(hook, root) for hook in manifest.hooks if is_patchable(hook)}
    texts = {module: module_path(root, module).read_text(encoding="utf-8") for module in set(modules.values())}
    found = {hook for hook, module in modules.items() if "\n".join(hook_lines(hook, module)) in texts[module]}
    missing = [hook.target for hook in modules if hook not in found]
    if missing and (found or any(f"# {_OURS}: " in text for text in texts.values())):
        raise ManifestError(
            f"{root}: the patch of {_OURS} is incomplete or of another version: {len(missing)} of {len(modules)} hooks "
            f"are missing, such as {missing[0]}; reverse it (git apply -R --unidiff-zero), and apply the patch that "
            "coca-mindspeed patches export writes, or none"
        )
    return found


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
    return len(text.splitlines())


def _ends_with_newline(path: Path) -> bool:
    return path.read_bytes().endswith(b"\n")
