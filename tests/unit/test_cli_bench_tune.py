"""``attnfuzz bench tune`` as it is typed."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import msgspec
import pytest

from attnfuzz.bench import tuning
from attnfuzz.bench.tuning_record import decode_tuned, grown
from tests.unit.in_process import attnfuzz
from tests.unit.timing_stand_ins import Pretended, declared, times

KERNELS = Path(__file__).parent / "timed_kernels.py"


def tune(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        return attnfuzz("bench", "tune", *arguments, cwd=cwd)


def test_without_a_gpu_it_refuses(tmp_path: Path) -> None:
    """Somebody would commit a tree that fits Triton's interpreter."""
    run = tune("paged_naive", cwd=tmp_path)
    assert run.returncode == 2
    assert "say nothing about a kernel" in run.stderr


def test_it_writes_a_module_and_json(tmp_path: Path) -> None:
    """What was measured would have to be copied from a terminal."""
    run = tune(
        f"{KERNELS}:right", "--device", "cpu", "--seconds", "0.001s", "--python", "tuned.py", "--json", "tuned.json",
        cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    source = (tmp_path / "tuned.py").read_text()
    assert source.strip() in run.stdout
    assert [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)] == ["choose_options"]
    written = (tmp_path / "tuned.json").read_bytes()
    assert decode_tuned(written).configurations == 2
    again = attnfuzz("bench", "tree", "tuned.json", "--python", "again.py", "--json", "again.json", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (tmp_path / "again.py").read_text() == source
    assert (tmp_path / "again.json").read_bytes() == written


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"features": ["os.system('true')"]}, "must be some of batch"),
        ({"record": {}}, "is not what attnfuzz bench tune --json writes"),
        ({"surplus": 1}, "is not what attnfuzz bench tune --json writes"),
    ],
)
def test_a_record_that_is_none_is_refused(changed: dict[str, object], told: str, tmp_path: Path) -> None:
    """A module would be written that runs what somebody else has put into the file."""
    kernel = declared("file.py:split", num_splits=(1, 8))
    plan = tuning.Tuning(options={}, max_batches=3)
    record = tuning.tune(Pretended(lambda request: times(request, 2.0)), kernel, plan)
    document = msgspec.to_builtins(grown(kernel.target, record, ("batch",), 8))
    (tmp_path / "record.json").write_bytes(msgspec.json.encode(document | changed))
    run = attnfuzz("bench", "tree", "record.json", "--python", "tuned.py", cwd=tmp_path)
    assert run.returncode == 2
    assert told in run.stderr
    assert not (tmp_path / "tuned.py").exists()


@pytest.mark.night
def test_options_that_go_together_are_tried_together(tmp_path: Path) -> None:
    """Most of the time would go into warps for blocks that are too small for them, or a typing error be taken."""
    kernel = Path(__file__).parent / "tuned_kernel.py"
    arguments: tuple[object, ...] = (kernel, "--device", "cpu", "--seconds", "0.001s")
    run = tune(
        *arguments, "--option", "tile/warps=16/4,64/8", "--option", "fused=false", "--json", "a.json", cwd=tmp_path
    )
    assert run.returncode == 0, run.stdout + run.stderr
    record = decode_tuned((tmp_path / "a.json").read_bytes()).record
    assert record.configurations == ({"tile": 16, "warps": 4}, {"tile": 64, "warps": 8})
    assert record.default == {"tile": 16, "warps": 1, "fused": False}
    for wrong in ("tile/warps=16", "tile=16,", "tile/tile=1/2", "a-b=1", "=1"):
        run = tune(*arguments, "--option", wrong, cwd=tmp_path)
        assert run.returncode == 2
        assert "must read NAME=VALUE" in run.stderr


@pytest.mark.night
def test_what_cannot_be_tuned_is_one_sentence(tmp_path: Path) -> None:
    """A wrong name would end in a traceback."""
    run = tune(KERNELS, "--device", "cpu", cwd=tmp_path)
    assert run.returncode == 2
    assert "names 11 kernels; name one" in run.stderr
    run = tune(f"{KERNELS}:drops_the_last_key", "--device", "cpu", cwd=tmp_path)
    assert run.returncode == 2
    assert "only one configuration" in run.stderr
