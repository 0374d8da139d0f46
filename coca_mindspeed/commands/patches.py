"""``coca-mindspeed patches``: compare a MindSpeed-RL checkout with the manifests, without importing it."""

import argparse
import os
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.files import write_atomically
from coca_mindspeed.mindspeed.manifest import Finding, Manifest, ManifestError, examine, load_manifests, skeleton


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    verify = actions.add_parser("verify", help="say whether a checkout is a supported, unedited release")
    verify.add_argument(
        "--mindspeed-rl",
        type=Path,
        metavar="PATH",
        default=os.environ.get("MINDSPEED_RL_HOME"),
        help="the checkout (default: MINDSPEED_RL_HOME)",
    )
    verify.add_argument("--release", help="compare with this release's manifest (default: the one that fits best)")
    fingerprint = actions.add_parser("fingerprint", help="write a manifest's skeleton for another release")
    fingerprint.add_argument("path", type=Path, help="the checkout")
    fingerprint.add_argument("--release", required=True, help="name of the new release")
    fingerprint.add_argument("--commit", required=True, help="its commit")
    fingerprint.add_argument("--like", help="take the hooks of this release (default: the one that fits best)")
    fingerprint.add_argument("--output", type=Path, metavar="FILE", help="write here instead of to the terminal")


def run(arguments: argparse.Namespace) -> int:
    return _verify(arguments) if arguments.action == "verify" else _fingerprint(arguments)


def _verify(arguments: argparse.Namespace) -> int:
    if arguments.mindspeed_rl is None:
        raise ConfigError("which checkout? give --mindspeed-rl PATH or set MINDSPEED_RL_HOME")
    root = _checkout(Path(arguments.mindspeed_rl))
    manifest, findings = _best_fit(root, arguments.release)
    table = Table(title=f"{root} against release {manifest.release} ({manifest.commit})", title_justify="left")
    for heading in ("target", "kind", "process", "result"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        hook = finding.hook
        result = "ok" if finding.matches else f"differs: expected {hook.sha256[:12]}, found {_short(finding)}"
        table.add_row(hook.target, hook.kind, hook.process, result)
    Console().print(table)
    differing = [finding.hook.target for finding in findings if not finding.matches]
    if differing:
        print(f"{len(differing)} of {len(findings)} differ: {', '.join(differing)}")
        return 1
    print(f"all {len(findings)} hooked definitions are those of release {manifest.release}")
    return 0


def _fingerprint(arguments: argparse.Namespace) -> int:
    root = _checkout(arguments.path)
    manifest, _ = _best_fit(root, arguments.like)
    content = skeleton(manifest, root, arguments.release, arguments.commit)
    text = yaml.safe_dump(content, sort_keys=False, width=140)
    if arguments.output is None:
        print(text, end="")
    else:
        write_atomically(arguments.output, text)
    return 0


def _checkout(path: Path) -> Path:
    if not (path / "mindspeed_rl").is_dir():
        raise ConfigError(f"{path}: expected a MindSpeed-RL checkout with a folder mindspeed_rl/, found none")
    return path.resolve()


def _best_fit(root: Path, release: str | None) -> tuple[Manifest, list[Finding]]:
    manifests = load_manifests()
    chosen = [manifest for manifest in manifests if release in (None, manifest.release)]
    if not chosen:
        known = ", ".join(manifest.release for manifest in manifests)
        raise ManifestError(f"no manifest for release {release!r}; known: {known}")
    examined = [(manifest, examine(manifest, root)) for manifest in chosen]
    return min(examined, key=lambda pair: sum(not finding.matches for finding in pair[1]))


def _short(finding: Finding) -> str:
    return finding.found[:12] if len(finding.found) == 64 else finding.found
