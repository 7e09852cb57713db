"""``attnfuzz ci``: ``replay`` and ``explore`` with what a pull request or a night needs, told to the CI around it."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click

from attnfuzz.cli.options import (
    DEVICE,
    FILE,
    KERNEL_HELP,
    SHARD,
    TRUST,
    Shard,
    configured,
    profile_option,
    refuse_untyped_links,
)
from attnfuzz.cli.outcome import SHOWN, Outcome
from attnfuzz.cli.output import Refusal, show_error, write_asked

_BUDGETS = {False: "5m", True: "1h"}
"""Budgets of a pull request, and of a night."""
_COMMITS = ("GITHUB_SHA", "BUILDKITE_COMMIT", "CI_COMMIT_SHA")


@click.command(context_settings={"ignore_unknown_options": True}, epilog=KERNEL_HELP)
@click.argument("rest", nargs=-1, type=click.UNPROCESSED, metavar="[KERNEL | OPTION OF EXPLORE]...")
@click.option("--nightly", is_flag=True, help="Search for an hour, with a seed of this night.")
@click.option(
    "-o", "--output", type=FILE, default="attnfuzz-ci", show_default=True, help="The folder for reports and findings."
)
@SHARD
@TRUST
@click.option("--device", type=DEVICE, default="auto", show_default=True)
@profile_option("device")
def command(
    rest: tuple[str, ...], nightly: bool, output: Path, shard: Shard | None, trust: bool, device: str
) -> Outcome:
    """Run saved cases, then search KERNELs for 5 minutes with a seed made of the commit; tell the CI what is new.

    Open saved cases are known: they are expected to fail, and the search does not count them. All else is as attnfuzz
    replay --known and attnfuzz explore do it; options of explore are handed on, as in attnfuzz ci my_decode.py --budget
    3m. The folder gets replay.json, explore.json, junit.xml, report.html, summary.md and findings, in a subfolder for
    each shard; a night without shards also merges findings with the saved cases, into merged. On GitHub findings are
    annotations and the summary is that of the job, on Buildkite an annotation. The exit status is 1 for what is new,
    2 where something could not be tested.
    """
    from attnfuzz.corpus import DEFAULT_FOLDER

    settings = configured()
    folder = output / f"shard-{shard.number}" if shard is not None else output
    _prepare(folder, below=output)
    both = ["--device", device, *(["--trust"] if trust else [])]
    both += ["--profile", settings.profile] if settings.profile else []
    both += ["--shard", f"{shard.number}/{shard.of}"] if shard is not None and shard.of is not None else []
    saved = settings.regressions or Path(DEFAULT_FOLDER)
    known = saved if any(saved.glob("*.json")) else None
    outcomes = []
    if known is not None:
        outcomes.append(_run("replay", str(known), "--known", "--json", str(folder / "replay.json"), *both))
    if all(one.signal is None for one in outcomes):
        preset = ["--seed", str(_seed(nightly, rest)), "--save-dir", f"{folder}/findings"]
        if not any(word.startswith("--budget") for word in rest):
            preset += ["--budget", _BUDGETS[nightly]]
        for option, name in (("--json", "explore.json"), ("--junit", "junit.xml"), ("--html", "report.html")):
            preset += [option, f"{folder}/{name}"]
        if known is not None and settings.against is None:
            preset += ["--against", str(known)]
        outcomes.append(_run("explore", *preset, *both, *rest))
    found = folder / "findings"
    if nightly and shard is None and found.is_dir() and outcomes[-1].signal is None:
        places = [str(place) for place in (known, found) if place is not None]
        _run("merge", *places, "-o", str(folder / "merged"), "--device", device, *(["--trust"] if trust else []))
    outcome = Outcome.of_all(outcomes)
    _tell(folder, outcome.status, shard)
    return outcome


_OURS = ("replay.json", "explore.json", "junit.xml", "report.html", "summary.md", "findings", "merged")


def _prepare(folder: Path, *, below: Path) -> None:
    """Make the folder for what a run leaves. Raises Refusal, also for links in place of that."""
    from attnfuzz.own_files import LinkError, OwnFolder

    refuse_untyped_links(below, "output", "-o")
    try:
        place = OwnFolder(folder, below=below)
        place.make()
        for name in _OURS:
            place.refuse_link(name)
        for name in ("replay.json", "explore.json"):  # an earlier run's would be told as this one's
            place.remove(name)
    except LinkError as error:
        raise Refusal(f"{error}, or name another folder with -o") from error
    except OSError as error:
        raise Refusal(f"-o {str(folder)!r} cannot be made ({error.strerror}); name another folder") from error


def _run(name: str, *arguments: str) -> Outcome:
    """The outcome of another command, which says itself what is wrong."""
    from attnfuzz.cli import command_called

    click.secho(f"attnfuzz {name} {' '.join(arguments)}", bold=True)
    try:
        outcome = command_called(name).main(list(arguments), prog_name=f"attnfuzz {name}", standalone_mode=False)
    except click.ClickException as error:
        show_error(error)
        return Outcome(judged=0)
    return outcome if isinstance(outcome, Outcome) else SHOWN  # of --help


def _seed(nightly: bool, rest: Sequence[str]) -> int:
    if nightly:
        return secrets.randbits(32)
    seed = seed_of_commit(os.environ, _head)
    if seed is None and not any(word.startswith("--seed") for word in rest):
        click.echo("no commit is known here, so the seed is drawn")
    return secrets.randbits(32) if seed is None else seed


def seed_of_commit(environment: Mapping[str, str], head: Callable[[], str]) -> int | None:
    """The first 32 bits of the commit that the CI names, or else of the one that is checked out; None without one."""
    commits = [environment.get(name, "") for name in _COMMITS]
    commit = next((one for one in commits if re.fullmatch("[0-9a-fA-F]{8,}", one)), "") or head()
    return int(commit[:8], 16) if commit else None


def _head() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):  # no git here, or one that waits for something
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _tell(folder: Path, status: int, shard: Shard | None) -> None:
    """Write summary.md, and tell GitHub or Buildkite where this runs there."""
    from attnfuzz.own_files import OwnFolder, append_to
    from attnfuzz.report.ci import github_annotations, summary_in_markdown

    text = summary_in_markdown(folder, status, title="attnfuzz" if shard is None else f"attnfuzz, {shard}")
    write_asked(("the file", folder / "summary.md", lambda path: OwnFolder(folder).write(path.name, text.encode())))
    if step_summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            append_to(Path(step_summary), text)
        except OSError as error:  # the job's result does not hang on it
            click.echo(f"the job has no summary: {error.strerror}: GITHUB_STEP_SUMMARY", err=True)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in github_annotations(folder):
            click.echo(line)
    if os.environ.get("BUILDKITE") == "true":
        _annotate_build(text, status, shard)


def _annotate_build(text: str, status: int, shard: Shard | None) -> None:
    context = f"attnfuzz-{shard.number}" if shard is not None else "attnfuzz"
    style = "success" if status == 0 else "error" if status == 1 else "warning"
    command = ["buildkite-agent", "annotate", "--style", style, "--context", context]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
        trouble = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        trouble = str(error)
    if trouble:  # the build's result does not hang on it
        click.echo(f"the build has no annotation: {trouble}", err=True)
