"""Apply a manifest's hooks to the MindSpeed-RL of this process: all or none, once, and back again for tests."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coca_mindspeed.mindspeed.patch_export import patched_hooks
from coca_mindspeed.upstream.manifest import Hook, Manifest, ManifestError, describe, examine

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Change:
    """How to put one thing, and how to take it back."""

    put: Callable[[], None]
    undo: Callable[[], None]


class AppliedHooks:
    """The hooks that are in place in this process; made by :func:`apply`."""

    def __init__(self, manifest: Manifest, processes: tuple[str, ...], changes: list[_Change]) -> None:
        self.manifest = manifest
        self.processes = processes
        self._changes = changes

    def revert(self) -> None:
        """Put everything back as it was, in reverse order."""
        global _applied
        while self._changes:
            self._changes.pop().undo()
        _applied = None


_applied: AppliedHooks | None = None


def apply(manifest: Manifest, root: Path, *, processes: tuple[str, ...], platform: str, rollout: str) -> AppliedHooks:
    """Verify every fingerprint below ``root``, then put the hooks of these processes in place.

    All or nothing: everything is looked up before the first change, and a failure takes back what was changed.
    Hooks that the checkout contains as a patch are left out.
    Applying the same manifest again adds whatever hooks of further processes are missing, and nothing else.

    Args:
        manifest: the release's.
        root: the checkout that ``import mindspeed_rl`` finds.
        processes: of :data:`~coca_mindspeed.upstream.manifest.PROCESSES`.
        platform: hooks of the other platform are left out.
        rollout: so are hooks of the other rollout engine.

    Raises:
        ManifestError: a definition differs, a patch is incomplete, another manifest is in place, or Python imports
            another MindSpeed-RL.
    """
    global _applied
    if _applied is not None:
        if _applied.manifest != manifest:
            raise ManifestError(
                f"release {_applied.manifest.release} is already hooked in this process; "
                f"revert it before applying {manifest.release}"
            )
        processes = tuple(process for process in processes if process not in _applied.processes)
        if not processes:
            return _applied
    if differing := [finding for finding in examine(manifest, root) if not finding.matches]:
        raise ManifestError(
            f"the MindSpeed-RL at {root} differs from release {manifest.release}: "
            + "; ".join(describe(finding) for finding in differing)
        )
    in_patch = patched_hooks(manifest, root)
    wanted = [
        hook
        for hook in manifest.hooks
        if hook.acts
        and hook not in in_patch
        and hook.process in processes
        and hook.platform in (None, platform)
        and hook.rollout in (None, rollout)
    ]
    changes = [_change(hook, root) for hook in wanted]
    done: list[_Change] = []
    try:
        for change in changes:
            done.append(change)
            change.put()
    except BaseException:
        for change in reversed(done):
            change.undo()
        raise
    before = _applied
    _applied = AppliedHooks(
        manifest,
        (*before.processes, *processes) if before else processes,
        [*before._changes, *done] if before else done,
    )
    return _applied


def _change(hook: Hook, root: Path) -> _Change:
    module_name, _, qualified = hook.target.partition(":")
    module = importlib.import_module(module_name)
    if not Path(str(module.__file__)).is_relative_to(root):
        raise ManifestError(
            f"{hook.target} was verified below {root}, but Python imports {module_name} from {module.__file__}"
        )
    owner: Any = module
    *path, name = qualified.split(".")
    for part in path:
        owner = getattr(owner, part)
    replacement = _resolve(str(hook.replacement))
    if hook.kind == "register":
        registry = getattr(owner, name)
        previous = registry.get(hook.key, _ABSENT)

        def unregister() -> None:
            if previous is _ABSENT:
                registry.pop(hook.key, None)
            else:
                registry[hook.key] = previous

        return _Change(lambda: registry.__setitem__(hook.key, replacement), unregister)
    # Look in the class's own dictionary: what it inherits must not become its own when it is put back.
    original = vars(owner).get(name, _ABSENT)
    if original is _ABSENT:
        raise ManifestError(f"{hook.target}: {owner!r} has no {name!r} of its own")
    make = replacement if hook.kind in ("wrap", "subclass") else lambda _original: replacement
    # What stands there then: another hook may have wrapped it before.
    return _Change(lambda: setattr(owner, name, make(vars(owner)[name])), lambda: setattr(owner, name, original))


def _resolve(dotted: str) -> Any:
    module, _, qualified = dotted.partition(":")
    value: Any = importlib.import_module(module)
    for part in qualified.split("."):
        value = getattr(value, part)
    return value
