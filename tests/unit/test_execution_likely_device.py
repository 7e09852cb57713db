"""Where a GPU is expected before anything has been loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnfuzz.execution import likely_device


@pytest.mark.parametrize(
    ("wanted", "has_driver", "visible", "device"),
    [
        ("cpu", True, None, "cpu"),
        ("cuda", False, None, "cuda"),
        ("auto", True, None, "cuda"),
        ("auto", True, "0,1", "cuda"),
        ("auto", True, "", "cpu"),
        ("auto", True, "-1", "cpu"),
        ("auto", False, None, "cpu"),
    ],
)
def test_a_gpu_is_expected_where_there_is_a_driver_and_nobody_hides_it(
    wanted: str,
    has_driver: bool,
    visible: str | None,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels would be interpreted on a machine with a GPU, or a process wait for a driver that is not there."""
    monkeypatch.setattr(likely_device, "_DRIVER_FILES", (str(tmp_path if has_driver else tmp_path / "none"),))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert likely_device.likely_device(wanted) == device
