"""Reports of compute-sanitizer's tools, in the forms that its manual and its users show."""

from __future__ import annotations

import pytest

from attnfuzz.sanitizer.report import is_complete, read_reports, unread_headers

MEMCHECK = """\
========= COMPUTE-SANITIZER
a line of the application
========= Invalid __global__ write of size 4 bytes
=========     at paged_decode_kernel(float *, int)+0x160 in paged_decode.py:41
=========     by thread (31,0,0) in block (2,5,0)
=========     Address 0x7f6510c00401 is misaligned
=========     and is 2 bytes after the nearest allocation at 0x7f6510c00000 of size 1024 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========     Host Frame: [0x32e990]
=========                in /lib/x86_64-linux-gnu/libcuda.so.1
=========
========= Program hit CUDA_ERROR_NOT_FOUND (error 500) on CUDA API call to cuGetProcAddress.
=========     Host Frame: [0x32e990]
=========
========= Invalid __shared__ read of size 16 bytes
=========     at 0x3c8 in /home/user/flash.cu:42:load_tile(int*,int*)
=========     by thread (0,1,0) in block (0,0,0)
=========     Address 0x4000 is out of bounds
=========
========= Target application returned an error
========= ERROR SUMMARY: 3 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Warning: Race reported between Write access at other_kernel+0x10 in a.py:1
=========     and Write access at other_kernel+0x10 in a.py:1 [4 hazards]
=========
========= Error: Race reported between Write access at reduce_kernel(float *)+0x580 in reduce.py:18
=========     and Read access at reduce_kernel(float *)+0x890 in reduce.py:21 [4080 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at 0x100 in sum_gpu(const int *, int *, unsigned int)
=========     by thread (98,0,0) in block (194,0,0)
=========     Address 0x7fbbca800000
=========
========= ERROR SUMMARY: 1 error
"""
SYNCCHECK = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in warp.
=========     at split_kernel+0xb0 in split.py:20
=========     by thread (19,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"


def test_memory_accesses() -> None:
    """An engineer would not learn which kernel, line, thread and address it was."""
    first, second = read_reports(MEMCHECK)
    assert first.what == "Invalid __global__ write of size 4 bytes"
    assert (first.kernel, first.source) == ("paged_decode_kernel", "paged_decode.py:41")
    assert (first.thread, first.block) == ("31,0,0", "2,5,0")
    assert (first.address, first.state) == (0x7F6510C00401, "misaligned")
    assert first.lines[-1] == "and is 2 bytes after the nearest allocation at 0x7f6510c00000 of size 1024 bytes"
    assert second.what == "Invalid __shared__ read of size 16 bytes"
    assert (second.kernel, second.source) == ("load_tile", "/home/user/flash.cu:42")


@pytest.mark.parametrize("words", ["Address", "Access at", "Access to"])
def test_addresses_of_all_versions(words: str) -> None:
    """Which tensor it is would not be told with CUDA 12.9 or 13."""
    report = read_reports(MEMCHECK.replace("Address 0x7f6510c00401", f"{words} 0x7f6510c00401"))[0]
    assert (report.address, report.state) == (0x7F6510C00401, "misaligned")


def test_races() -> None:
    """Threads that write the same value would count as a bug, or those that do not would pass."""
    (report,) = read_reports(RACECHECK)
    assert report.what == "Race between Write and Read access"
    assert (report.kernel, report.source) == ("reduce_kernel", "reduce.py:18")
    assert unread_headers(RACECHECK) == []


def test_hazards_of_older_versions() -> None:
    """With another way of reporting, a race would pass."""
    log = "========= Error: Potential RAW hazard detected at __shared__ 0x0 in block (0, 0, 0) :\n"
    assert [report.what for report in read_reports(log)] == ["RAW hazard: __shared__"]


@pytest.mark.parametrize(
    ("log", "what", "kernel"),
    [
        (INITCHECK, "Uninitialized __global__ memory read of size 4 bytes", "sum_gpu"),
        (SYNCCHECK, "Barrier error detected: Divergent thread(s) in warp", "split_kernel"),
        (
            SYNCCHECK.replace(" in split.py:20", ""),
            "Barrier error detected: Divergent thread(s) in warp",
            "split_kernel",
        ),
    ],
)
def test_other_tools(log: str, what: str, kernel: str) -> None:
    """Their findings would all be one."""
    (report,) = read_reports(log)
    assert (report.what, report.kernel) == (what, kernel)


def test_a_clean_log_has_no_report_and_is_complete() -> None:
    """A run that found nothing would be told from one that was cut off by nothing."""
    assert read_reports(CLEAN) == []
    assert unread_headers(CLEAN) == []
    assert is_complete(CLEAN)
    assert is_complete(RACECHECK)
    assert not is_complete(CLEAN.partition("\n")[0])


def test_what_nobody_has_seen_is_not_lost() -> None:
    """A new kind of error would count as none."""
    log = MEMCHECK + "========= Fatal UVM GPU fault of type invalid pde due to write access\n=========     during it\n"
    assert unread_headers(log) == ["Fatal UVM GPU fault of type invalid pde due to write access"]
