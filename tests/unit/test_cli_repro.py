"""``attnfuzz repro``: what cannot be put into a script is refused."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from attnfuzz.cli.show import repro_command
from tests.unit.saved_findings import a_finding, save


def test_a_finding_that_takes_other_inputs_is_refused(tmp_path: Path) -> None:
    """The script would run the case alone, which passes, and say so to whoever reads the issue."""
    path = save(tmp_path, a_finding(3, oracle="value_affinity", kind="bits")).path
    result = CliRunner().invoke(repro_command, [str(path)])
    assert result.exit_code == 2
    assert "was found by value_affinity" in result.output
    assert "use attnfuzz replay" in result.output


def test_a_finding_of_a_sanitizer_is_refused(tmp_path: Path) -> None:
    """The script would compare numbers that are right, and say that nothing is wrong."""
    path = save(
        tmp_path, a_finding(3, oracle="sanitizer", kind="memcheck: Invalid __global__ read of size 2 bytes")
    ).path
    result = CliRunner().invoke(repro_command, [str(path)])
    assert result.exit_code == 2
    assert "replay it with --sanitizer" in result.output
