"""``coca-mindspeed patches``: compare a checkout or an installed upstream with the manifests, unimported."""

import argparse
import os
import shlex
from pathlib import Path

import yaml
from rich.table import Table

from coca_mindspeed.cli.options import place, subcommand
from coca_mindspeed.errors import ConfigError, UsageError
from coca_mindspeed.upstream.manifest import (
    PROGRAMS,
    HookCheck,
    Manifest,
    ManifestError,
    closest_manifest,
    load_manifests,
    matching_manifest,
    skeleton,
)
from coca_mindspeed.utils.console import PlainConsole, print_text
from coca_mindspeed.utils.files import write_atomically


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    about = (
        "compare the hooked definitions of a checkout, one by one, with those of a supported release; exit code 1 if a "
        "contract differs"
    )
    verify = actions.add_parser("verify", help=about, description=about)
    where = "the checkout, or the folder of installed packages (default: MINDSPEED_RL_HOME)"
    verify.add_argument("path", nargs="?", type=Path, metavar="PATH", help=where)
    release = "compare with this release's manifest (default: the one that fits best)"
    verify.add_argument("--release", metavar="NAME", help=release)

    about = "write the manifest of a new release, with the hooks of a known one and the fingerprints of a checkout"
    fingerprint = subcommand(actions, "fingerprint", about)
    fingerprint.add_argument("path", type=Path, metavar="PATH", help="the checkout")
    fingerprint.add_argument("--release", required=True, metavar="NAME", help="name of the new release")
    fingerprint.add_argument("--commit", required=True, metavar="HASH", help="its commit")
    like = "take the hooks of this release (default: the one that fits best)"
    fingerprint.add_argument("--like", metavar="NAME", help=like)
    fingerprint.add_argument("--output", type=place, metavar="FILE", help="write here instead of to the terminal")

    about = "write the hooks as a patch for the files of a MindSpeed-RL checkout, for git apply (docs/port.md)"
    export = subcommand(actions, "export", about)
    where = "the checkout, of a supported release or a fork of one (default: MINDSPEED_RL_HOME)"
    export.add_argument("path", nargs="?", type=Path, metavar="CHECKOUT", help=where)
    export.add_argument("--output", type=place, required=True, metavar="FILE", help="where the patch is written")


def run(arguments: argparse.Namespace) -> int:
    return {"verify": _verify, "fingerprint": _fingerprint, "export": _export}[arguments.action](arguments)


def _verify(arguments: argparse.Namespace) -> int:
    root = _checkout(arguments.path, "its PATH")
    manifest, findings = _best_fit(root, arguments.release)
    differing = [finding for finding in findings if not finding.matches]
    refused = [finding.hook.target for finding in differing if finding.refused]
    contracts = f"refused: {', '.join(refused)}" if refused else "no contract among them"
    verdict = f"{len(differing)} of {len(findings)} differ, {contracts}"
    print_text(verdict if differing else f"all {len(findings)} hooked definitions equal release {manifest.release}")
    whole, patch = _patch_in(manifest, root, bool(refused))
    if patch:
        print_text(patch)
    if differing:
        table = Table(title=f"{root} against release {manifest.release} ({manifest.commit})", title_justify="left")
        for heading in ("target", "kind", "severity", "difference"):
            table.add_column(heading)
        for finding in differing:
            table.add_row(finding.hook.target, finding.hook.kind, finding.hook.severity, finding.difference)
        PlainConsole().print_table(table)
    return int(bool(refused) or not whole)


def _patch_in(manifest: Manifest, root: Path, differs: bool) -> tuple[bool, str]:
    """Whether a checkout has no part of a patch only, and a sentence about its patch if it has lines of one."""
    from coca_mindspeed.mindspeed.hooks import applied_patch, patch_lines, patch_version

    if manifest.package != "mindspeed_rl" or not (found := patch_lines(manifest, root)):
        return True, ""
    patched = f"patched by coca_mindspeed {patch_version(found)}"
    if differs:
        return True, f"{patched}: take it back (git apply -R) to see whether the checkout differs without it"
    try:
        applied_patch(manifest, root)
    except ManifestError as error:
        return False, f"refused: {error}"
    return True, f"{patched}: the driver applies none of the hooks that the patch contains"


def _fingerprint(arguments: argparse.Namespace) -> int:
    root = _checkout(arguments.path, "its PATH")
    manifest, _ = _best_fit(root, arguments.like)
    content = skeleton(manifest, root, arguments.release, arguments.commit)
    text = yaml.safe_dump(content, sort_keys=False, width=140)
    if arguments.output is None:
        print(text, end="")
    else:
        write_atomically(arguments.output, text)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from coca_mindspeed.mindspeed.hooks import applied_patch, export_patch

    root, file = _checkout(arguments.path, "it"), arguments.output
    if not (root / "mindspeed_rl").is_dir():
        raise ConfigError(f"{root}: expected a MindSpeed-RL checkout with a folder mindspeed_rl/: only it is patched")
    manifest = matching_manifest(root)
    if (version := applied_patch(manifest, root)) is not None:
        raise ConfigError(
            f"{root}: is patched already, by coca_mindspeed {version}; expected a checkout without a patch: take it "
            "back first (git apply -R)"
        )
    write_atomically(file, export_patch(manifest, root))
    print_text(f"written: {file}, for release {manifest.release} at {root}")
    print_text(f"git -C {shlex.quote(str(root))} apply {shlex.quote(str(file.resolve()))}")
    return 0


def _checkout(named: Path | None, how: str) -> Path:
    """The checkout that is named on the command line, or by the environment."""
    path = named or (Path(home) if (home := os.environ.get("MINDSPEED_RL_HOME")) else None)
    if path is None:
        raise UsageError(f"which checkout? name {how} or set MINDSPEED_RL_HOME")
    if not any((path / package).is_dir() for package in PROGRAMS):
        raise ConfigError(
            f"{path}: expected a checkout, or the folder of installed packages, with a folder of "
            f"{', '.join(PROGRAMS)}; found none"
        )
    return path.resolve()


def _best_fit(root: Path, release: str | None) -> tuple[Manifest, list[HookCheck]]:
    package = next(package for package in PROGRAMS if (root / package).is_dir())
    manifests = load_manifests(package=package)
    chosen = [manifest for manifest in manifests if release in (None, manifest.release)]
    if not chosen:
        known = ", ".join(manifest.release for manifest in manifests)
        raise UsageError(f"no manifest for release {release!r}; known: {known}")
    return closest_manifest(chosen, root)
