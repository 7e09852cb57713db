"""An executable in the place of compute-sanitizer: runs its command and writes a report about some cases."""

from __future__ import annotations

import sys
from pathlib import Path

OBJECTS_TO = "STAND_IN_OBJECTS_TO"
"""Names the variable that holds a piece of the JSON of the cases that it objects to."""
BEHAVES = "STAND_IN_BEHAVES"
"""Names the one that says what else it does: words in `_SCRIPT`. With "idle" it runs nothing, which takes no time."""

_SCRIPT = """#!{python}
import json, os, subprocess, sys, time

arguments = sys.argv[1:]
tool, log = arguments[arguments.index("--tool") + 1], arguments[arguments.index("--log-file") + 1]
command = arguments[arguments.index("--launch-timeout") + 2 :]
how = os.environ.get("STAND_IN_BEHAVES", "")
if "broken" in how:
    print("this tool does not go with this driver")
    sys.exit(1)
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
work = json.load(open(command[-1]))
if "idle" in how:
    status = 0
    with open(work["notes"], "w") as notes:
        for i in range(len(work["cases"])):
            notes.write(json.dumps({{"case": i, "tensors": [["k", 4096, 64]]}}) + "\\n")
            notes.write(json.dumps({{"case": i, "done": True}}) + "\\n")
else:
    status = subprocess.run(command).returncode
if "stuck" in how:
    time.sleep(600)
wanted = os.environ.get("STAND_IN_OBJECTS_TO", "nothing")
guilty = [case for case in work["cases"] if wanted in json.dumps(case, separators=(",", ":"))]
lines = ["========= COMPUTE-SANITIZER"]
if "no CUDA" in how:
    lines.append("========= Error: Target application terminated before first instrumented API call")
for case in guilty:
    notes = [json.loads(line) for line in open(work["notes"])]
    ((_, start, nbytes),) = [t for t in notes[0]["tensors"] if t[0] == "k"]
    lines += [
        "========= Invalid __global__ read of size 2 bytes",
        "=========     at sum_keys_kernel+0x1a0 in decode.py:12",
        "=========     by thread (3,0,0) in block (1,2,0)",
        f"=========     Address 0x{{start + nbytes:x}} is out of bounds",
        "=========     Saved host backtrace up to driver entry point at kernel launch time",
        "=========     Host Frame: cuLaunchKernel [0x2f] in libcuda.so.1",
        "=========",
    ]
if "unfinished" not in how:
    lines.append(f"========= ERROR SUMMARY: {{len(guilty)}} error(s)")
open(log, "w").write("\\n".join(lines) + "\\n")
sys.exit(status or (86 if guilty else 0))
"""


def install(folder: Path) -> Path:
    """Write the executable into `folder`, which is to be put on PATH."""
    executable = folder / "compute-sanitizer"
    executable.write_text(_SCRIPT.format(python=sys.executable))
    executable.chmod(0o755)
    return executable
