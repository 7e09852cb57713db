"""``attnfuzz merge``: the save folders of several machines brought together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnfuzz.cli.options import DEVICE, FILE, TOLERANCE, TRUST, profile_option, refuse_untyped_links
from attnfuzz.cli.outcome import Outcome
from attnfuzz.cli.output import Refusal, refusing
from attnfuzz.cli.replay import read_saved

if TYPE_CHECKING:
    from attnfuzz.campaign.saved.replay import SavedCase
    from attnfuzz.judging.runner import Runner
    from attnfuzz.problems.declared_numerics import Tolerance
    from attnfuzz.report.saved_cases import Merged


@click.command()
@click.argument("paths", nargs=-1, required=True, type=FILE, metavar="DIR...")
@click.option(
    "-o",
    "--output",
    "save_folder",
    type=FILE,
    help="The folder that gets the result; what it holds already is merged too  [default: regressions]",
)
@click.option(
    "--verify/--no-verify", default=True, help="Run every case that is kept, or none: where a GPU is missing."
)
@TRUST
@click.option("--device", type=DEVICE, default="auto", show_default=True)
@TOLERANCE
@profile_option("device", "tolerance", "regressions")
def command(
    paths: tuple[Path, ...], save_folder: Path | None, verify: bool, trust: bool, device: str, tolerance: Tolerance
) -> Outcome:
    """Bring what several machines saved (DIRs, or single files) together in one folder.

    The command keeps the smallest case of each bug that still fails when it is run here, and puts cases that fail no
    longer aside in the subfolder "passing". It only reads the DIRs. The exit status is 1 if a kept case fails, or was
    not verified.
    """
    with refusing():
        from attnfuzz.corpus import DEFAULT_FOLDER, regression_files
        from attnfuzz.report.saved_cases import print_merged
        from attnfuzz.report.terminal import make_console

        output = save_folder or Path(DEFAULT_FOLDER)
        _check_output(output, paths)
        given = read_saved(regression_files(paths))
        own = read_saved(regression_files([output]) if output.exists() else [])
        from attnfuzz.judging.runner import Runner

        with Runner(device=device, tolerance=tolerance) if verify and given else nullcontext() as runner:
            rows = _merge([*own, *given], output, runner, trust=trust)
    print_merged(make_console(), rows, files=len(given), folders=len(paths), output=output, verified=verify)
    return Outcome(judged=None, failed=any(row.counts for row in rows))


def _check_output(output: Path, paths: Sequence[Path]) -> None:
    """Refuse what would change a folder that is to be merged, or cannot be written. Raises Refusal."""
    refuse_untyped_links(output, "save_folder", "-o")
    if output.exists() and not output.is_dir():
        raise Refusal(f"-o {str(output)!r} is a file; name a folder")
    place = output.resolve()
    for path in paths:
        if place in (path.resolve(), path.resolve().parent if path.is_file() else None):
            raise Refusal(
                f"{str(path)!r} is where the result goes, and counts anyway; leave it out, or name another folder "
                "with -o: what is merged is never changed"
            )


def _merge(saved: Sequence[SavedCase], output: Path, runner: Runner | None, *, trust: bool) -> list[Merged]:
    from attnfuzz.campaign.saved.merging import Checked, MergedFolder, check_again, tell_apart
    from attnfuzz.report.saved_cases import Merged

    rows = []
    folder = MergedFolder(output, device=runner.device_name if runner is not None else "")
    try:
        for bug in tell_apart(saved):
            unchecked = Checked(bug.files[0], "unverified")
            checked = unchecked if runner is None else check_again(bug, runner, trust=trust)
            rows.append(Merged(bug, checked, folder.keep(bug, checked)))
    except OSError as error:
        raise Refusal(
            f"{str(output)!r} cannot be written ({error.strerror}); name a folder that can with -o: the merged folders "
            "are as they were"
        ) from error
    return rows
