"""``attnfuzz explain``: what a kernel does wrong on a saved case, in words and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnfuzz.cli.options import DEVICE, FILE, KERNEL_HELP, TOLERANCE, TRUST, profile_option, writable_file
from attnfuzz.cli.outcome import Outcome
from attnfuzz.cli.output import Refusal, refusing

if TYPE_CHECKING:
    from attnfuzz.campaign.saved.replay import SavedCase
    from attnfuzz.judging.runner import Runner
    from attnfuzz.problems.declared_numerics import Tolerance
    from attnfuzz.report.explained import Explained


_PICTURES = (".svg", ".png")
_WEIGHING_S = 20.0
_TOTAL_S = 30.0


def _picture_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.suffix not in _PICTURES:
        raise click.BadParameter(f"{str(value)!r} must end in .svg or .png", ctx, param)
    return writable_file(ctx, param, value)


@click.command(epilog=KERNEL_HELP)
@click.argument("case", type=FILE, metavar="CASE")
@click.option("--kernel", metavar="KERNEL", help="Explain what this kernel does on the case instead.")
@TRUST
@click.option("-o", "--output", type=FILE, callback=_picture_file, help="Also draw the weights: FILE.svg or FILE.png.")
@click.option("--json", "json_file", type=FILE, callback=writable_file, help="Also write everything as JSON.")
@click.option("--device", type=DEVICE, default="auto", show_default=True)
@click.option("--python", type=FILE, metavar="PATH", help="Run the kernel in this virtual environment.")
@TOLERANCE
@profile_option("device", "tolerance")
def command(
    case: Path,
    kernel: str | None,
    trust: bool,
    output: Path | None,
    json_file: Path | None,
    device: str,
    python: Path | None,
    tolerance: Tolerance,
) -> Outcome:
    """Run the regression file CASE in variations and say what is wrong.

    It shows which weight the kernel gave to each token and which it should have given, where stray values enter, and
    which single changes of the case make it pass. The exit status is 1 if the case fails.
    """
    with refusing():
        from attnfuzz.campaign.compared_environments import naming
        from attnfuzz.campaign.saved.replay import SavedCase
        from attnfuzz.corpus import load_regression
        from attnfuzz.isolation.pythons import examine
        from attnfuzz.judging.runner import Runner

        regression = load_regression(case)
        where = None if python is None else examine(python)
        path = None if where is None else where.path
        with naming(where), Runner(device=device, tolerance=tolerance, python=path) as runner:
            explained = _explain(SavedCase(case, regression), kernel, runner, trust=trust)
    from attnfuzz.report.explained import print_explained
    from attnfuzz.report.terminal import make_console

    _write(explained, output, json_file)
    print_explained(make_console(), explained)
    return Outcome(judged=1, failed=explained.failure is not None)


def _explain(saved: SavedCase, kernel: str | None, runner: Runner, *, trust: bool) -> Explained:
    import msgspec

    from attnfuzz.campaign.saved.replay import kernel_and_case, run_saved
    from attnfuzz.campaign.triage.explanation import explain_failure
    from attnfuzz.cases.supported import why_unsupported
    from attnfuzz.explaining.explanation import Explanation
    from attnfuzz.report.explained import Explained

    path, regression = saved.path, saved.regression
    declaration, case = kernel_and_case(saved, runner, kernel=kernel, trust=trust)
    if (objection := why_unsupported(declaration.supports, declaration.options, case)) is not None:
        raise Refusal(f"kernel {declaration.target!r} does not support this case: {objection}; name another kernel")
    verdict = run_saved(regression, declaration, runner).verdict
    if verdict.not_runnable:
        raise Refusal(f"kernel {declaration.target!r} cannot run this case here: {verdict.not_runnable}; use a GPU")
    failure = verdict.failure
    explanation = Explanation()
    if failure is not None:
        explanation = explain_failure(runner, declaration, case, failure, weighing_s=_WEIGHING_S, total_s=_TOTAL_S)
        if regression.preceding:
            note = f"the case fails only after {len(regression.preceding)} others, without which it is explained here"
            explanation = msgspec.structs.replace(explanation, lines=(note, *explanation.lines))
    return Explained(path, msgspec.structs.replace(regression, case=case), declaration, failure, explanation)


def _write(explained: Explained, output: Path | None, json_file: Path | None) -> None:
    from attnfuzz.own_files import write_file
    from attnfuzz.report.explained import RasteriserMissing, explained_png, explained_svg, write_explained

    try:
        if output is not None:
            is_svg = output.suffix == ".svg"
            write_file(output, explained_svg(explained).encode() if is_svg else explained_png(explained))
        if json_file is not None:
            write_explained(json_file, explained)
    except RasteriserMissing as error:
        raise Refusal(f"-o {str(output)!r}: {error}") from error
    except OSError as error:
        raise Refusal(f"{error.filename or 'the file'} cannot be written: {error.strerror}") from error
