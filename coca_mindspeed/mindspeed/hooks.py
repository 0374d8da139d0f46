"""Apply a manifest's hooks to the MindSpeed-RL of this process: all or none, once, and revertible for tests."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from coca_mindspeed.mindspeed.patch_export import patched_hooks
from coca_mindspeed.upstream.manifest import Hook, Manifest, ManifestError, describe, examine

_ABSENT = object()


class _Change(NamedTuple):
    put: Callable[[], None]
    undo: Callable[[], None]


class AppliedHooks:
    """The hooks in place in this process; made by :func:`apply`."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.processes: tuple[str, ...] = ()
        self._changes: list[_Change] = []

    def put(self, changes: list[_Change]) -> None:
        """Make the changes, or none of them if one fails."""
        done: list[_Change] = []
        try:
            for change in changes:
                done.append(change)
                change.put()
        except BaseException:
            for change in reversed(done):
                change.undo()
            raise
        self._changes += done

    def revert(self) -> None:
        """Undo every change, in reverse order."""
        global _applied
        while self._changes:
            self._changes.pop().undo()
        _applied = None


_applied: AppliedHooks | None = None


def apply(manifest: Manifest, root: Path, *, processes: tuple[str, ...], platform: str, rollout: str) -> AppliedHooks:
    """Verify every fingerprint below ``root``, then put the hooks of these processes in place.

    Hooks of another platform or rollout engine are skipped, and those that the checkout contains as a patch.  Applying
    the same manifest again adds the hooks of further processes only.

    Raises ManifestError if a definition differs, a patch is incomplete, another manifest is in place, or Python imports
    another MindSpeed-RL than the one below ``root``.
    """
    global _applied
    if _applied is not None and _applied.manifest != manifest:
        raise ManifestError(
            f"release {_applied.manifest.release} is already hooked in this process; "
            f"revert it before applying {manifest.release}"
        )
    applied = _applied or AppliedHooks(manifest)
    processes = tuple(process for process in processes if process not in applied.processes)
    if not processes:
        return applied
    if differing := [finding for finding in examine(manifest, root) if not finding.matches]:
        raise ManifestError(
            f"the MindSpeed-RL at {root} differs from release {manifest.release}: "
            + "; ".join(describe(finding) for finding in differing)
        )
    in_patch = patched_hooks(manifest, root)
    applied.put(
        [
            _change(hook, root)
            for hook in manifest.hooks
            if hook.acts
            and hook not in in_patch
            and hook.process in processes
            and hook.platform in (None, platform)
            and hook.rollout in (None, rollout)
        ]
    )
    applied.processes += processes
    _applied = applied
    return applied


def _change(hook: Hook, root: Path) -> _Change:
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
        previous = registry.get(hook.key, _ABSENT)

        def unregister() -> None:
            if previous is _ABSENT:
                registry.pop(hook.key, None)
            else:
                registry[hook.key] = previous

        return _Change(lambda: registry.__setitem__(hook.key, replacement), unregister)
    # From the owner's own dictionary: an inherited attribute must not be set on the class when the hook is undone.
    original = vars(owner).get(name, _ABSENT)
    if original is _ABSENT:
        raise ManifestError(f"{hook.target}: {owner!r} has no {name!r} of its own")
    make = replacement if hook.kind in ("wrap", "subclass") else lambda _original: replacement
    # The current value, not ``original``: another hook may have wrapped it in the meantime.
    return _Change(lambda: setattr(owner, name, make(vars(owner)[name])), lambda: setattr(owner, name, original))


def _attribute(value: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        value = getattr(value, name)
    return value
