"""``coca-mindspeed patches``: compare a MindSpeed-RL checkout or an installed verl with the manifests, unimported."""

import argparse
import os
from pathlib import Path

import yaml
from rich.table import Table

from coca_mindspeed.cli.options import place, subcommand
from coca_mindspeed.errors import ConfigError, UsageError
from coca_mindspeed.upstream.manifest import PROGRAMS, HookCheck, Manifest, closest_manifest, load_manifests, skeleton
from coca_mindspeed.utils.console import PlainConsole, print_text
from coca_mindspeed.utils.files import write_atomically


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    about = (
        "compare the hooked definitions of a checkout, one by one, with those of a supported release; exit code 1 if a "
        "contract differs"
    )
    verify = actions.add_parser("verify", help=about, description=about)
    where = "the checkout, or where verl is (default: MINDSPEED_RL_HOME)"
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

    about = "write the hooks of a release as a patch for its checkout: git apply --unidiff-zero (docs/port.md)"
    export = subcommand(actions, "export", about)
    export.add_argument("release", metavar="RELEASE", help="a supported release of MindSpeed-RL")
    export.add_argument("--mindspeed-rl", type=Path, metavar="PATH", help="its checkout (default: MINDSPEED_RL_HOME)")
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
    table = Table(title=f"{root} against release {manifest.release} ({manifest.commit})", title_justify="left")
    for heading in ("target", "kind", "severity", "result"):
        table.add_column(heading)
    for finding in findings:
        hook = finding.hook
        result = "ok" if finding.matches else f"differs: {finding.difference}"
        table.add_row(hook.target, hook.kind, hook.severity, result)
    PlainConsole().print_table(table)
    return int(bool(refused))


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
    from coca_mindspeed.mindspeed.hooks import export_patch, patched_hooks

    root = _checkout(arguments.mindspeed_rl, "it with --mindspeed-rl")
    manifest, findings = _best_fit(root, arguments.release)
    if differing := [f"{each.hook.target} ({each.difference})" for each in findings if not each.matches]:
        raise ConfigError(f"{root}: not release {manifest.release} unedited: {'; '.join(differing)}")
    if patched_hooks(manifest, root):
        raise ConfigError(f"{root}: the patch is applied already; export from an unedited checkout")
    write_atomically(arguments.output, export_patch(manifest, root))
    return 0


def _checkout(named: Path | None, how: str) -> Path:
    """The checkout that is named on the command line, or by the environment."""
    path = named or (Path(home) if (home := os.environ.get("MINDSPEED_RL_HOME")) else None)
    if path is None:
        raise UsageError(f"which checkout? name {how} or set MINDSPEED_RL_HOME")
    if not any((path / package).is_dir() for package in PROGRAMS):
        raise ConfigError(
            f"{path}: expected a MindSpeed-RL checkout with a folder mindspeed_rl/, or the folder that verl/ is "
            "installed in, found neither"
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
