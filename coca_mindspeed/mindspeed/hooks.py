"""Apply a manifest's hooks to the MindSpeed-RL of this process, once, after everything that they need was found."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coca_mindspeed.mindspeed.patch_export import patched_hooks
from coca_mindspeed.upstream.manifest import Hook, Manifest, ManifestError, describe, examine

_applied: dict[str, Manifest] = {}  # by process


def apply(manifest: Manifest, root: Path, *, processes: tuple[str, ...], platform: str, rollout: str) -> None:
    """Verify every fingerprint below ``root``, then put the hooks of these processes in place.

    Hooks of another platform or rollout engine are skipped, and those that the checkout contains as a patch.  Applying
    the same manifest again adds the hooks of further processes only.

    Raises ManifestError if a definition differs, a patch is incomplete, another manifest is in place, or Python imports
    another MindSpeed-RL than the one below ``root``.
    """
    if (other := next(iter(_applied.values()), manifest)) != manifest:
        raise ManifestError(f"release {other.release} is already hooked in this process, not {manifest.release}")
    processes = tuple(process for process in processes if process not in _applied)
    if not processes:
        return
    if differing := [finding for finding in examine(manifest, root) if not finding.matches]:
        raise ManifestError(
            f"the MindSpeed-RL at {root} differs from release {manifest.release}: "
            + "; ".join(describe(finding) for finding in differing)
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
