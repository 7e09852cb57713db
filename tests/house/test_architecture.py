"""The layers that ARCHITECTURE.md describes, held by reading the source: imports, public names, docstrings."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("attnfuzz", "kernels", "strategies") for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))

# A module may import those of its own rank and lower. The longest prefix that fits a module's name counts.
RANKS = {
    "attnfuzz": 0,  # the public names, each imported when it is first used
    "attnfuzz.problems": 1,  # what problems and cases are made of
    "attnfuzz.problems.cases": 6,  # the list of all of them
    "attnfuzz.cases.facets": 2,  # what is known of their fields
    "attnfuzz.values": 3,  # numbers for them
    "attnfuzz.inputs": 4,  # tensors of them
    "attnfuzz.inputs.allocation": 1,  # which knows their shapes only
    "attnfuzz.bundled": 6,  # the problems, a file each
    "attnfuzz.cases": 6,  # what is known of whole cases
    "attnfuzz.numerics": 5,
    "attnfuzz.strategies": 6,
    "attnfuzz.memory": 6,
    "attnfuzz.declaration": 6,
    "attnfuzz.minimise": 6,
    "attnfuzz.adapters": 5,  # where engines' kernels are; heavy packages are imported when a kernel is loaded
    "attnfuzz.adapters.engine": 6,
    "attnfuzz.adapters.solution": 6,
    "attnfuzz.families": 5,  # problems made of the parts that users have
    "attnfuzz.families.block_sparse_kernels": 6,
    "attnfuzz.families.cache_write_kernels": 6,
    "attnfuzz.families.history_kernels": 6,
    "attnfuzz.families.hybrid_decode_kernels": 6,
    "attnfuzz.families.indexer_topk_kernels": 6,
    "attnfuzz.families.latent_verify_kernels": 6,
    "attnfuzz.families.sparse_decode_kernels": 6,
    "attnfuzz.families.merge_ranks_kernels": 6,
    "attnfuzz.families.packed_decode_kernels": 6,
    "attnfuzz.families.recurrent_decode_kernels": 6,
    "attnfuzz.kernels": 6,
    "attnfuzz.oracles": 8,
    "attnfuzz.oracles.own": 0,  # what users' files say
    "attnfuzz.oracles.registry": 0,  # what is known of oracles without their code
    "attnfuzz.trials": 6,  # runs of a kernel on a case
    "attnfuzz.judging": 9,
    "attnfuzz.explaining": 7,
    "attnfuzz.identity": 10,  # which bug a failure is
    "attnfuzz.isolation": 6,  # processes that may die: generic
    "attnfuzz.triton_compat": 6,
    "attnfuzz.triton_compat.interpreter_accesses": 7,
    "attnfuzz.triton_compat.interpreter_operations": 7,
    "attnfuzz.triton_compat.interpreter_schedules": 7,
    "attnfuzz.corpus": 8,
    "attnfuzz.campaign": 11,
    "attnfuzz.campaign.stopping": 0,  # text only
    "attnfuzz.composition": 6,
    "attnfuzz.conformance": 12,
    "attnfuzz.config": 5,
    "attnfuzz.data_files": 0,  # opening what a user names
    "attnfuzz.bench": 12,
    "attnfuzz.environment": 0,  # versions, found without importing anything
    "attnfuzz.doctor": 12,
    "attnfuzz.mutation": 12,
    "attnfuzz.overlay": 0,
    "attnfuzz.own_files": 0,  # whatever is written to a disk
    "attnfuzz.internal_errors": 0,  # text only
    "attnfuzz.project": 0,
    "attnfuzz.safe_start": 0,  # runs before anything else
    "attnfuzz.untrusted_text": 0,  # text only
    "attnfuzz.mistake": 0,  # what is known of each, as data
    "attnfuzz.verdict": 0,  # data that every layer passes on
    "attnfuzz.probe": 0,  # runs in a process of its own
    "attnfuzz.testing": 12,
    "attnfuzz.report": 12,
    "attnfuzz.sanitizer": 12,
    "attnfuzz.cli": 13,
    "attnfuzz.pytest_plugin": 13,
    "attnfuzz.__main__": 13,
}
# What knows nothing of a folder that stands above it: tensors are made of a case as it is.
STRANGERS = {"attnfuzz.values": "attnfuzz.cases", "attnfuzz.inputs": "attnfuzz.cases"}
# A campaign's stations, and what lies between them: each may import those before it.
STATIONS = ("draw", "counts", "messages", "judge", "triage", "inference", "result", "saved")
LIGHT = [
    "attnfuzz.problems.own",
    "attnfuzz.cases.features",
    "attnfuzz.cases.supported",
    "attnfuzz.declaration",
    "attnfuzz.testing",
    "attnfuzz.cli",
    "attnfuzz.corpus",
    "attnfuzz.pytest_plugin",
    "attnfuzz.campaign.startup",
    "attnfuzz.campaign.saved.replay",
    "attnfuzz.judging.runner",
    "attnfuzz.report.html",
]
HEAVY = {"torch", "triton", "hypothesis", "numpy"}

# What makes tensors on PyTorch's default device: of the default dtype where no other is named, or of integers.
OF_NUMBERS = {
    "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace",
    "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
OF_INTEGERS = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}

# What changes a disk by a path, by the name of the function or method.
CHANGING = {
    "chmod", "chown", "copy2", "copyfile", "copytree", "fdopen", "hardlink_to", "lchmod", "link", "makedirs", "mkdir",
    "mkfifo", "mknod", "move", "remove", "removedirs", "rename", "renames", "replace", "rmdir", "rmtree", "symlink",
    "symlink_to", "touch", "truncate", "unlink", "utime", "write_bytes", "write_text",
}  # fmt: skip
OF_OTHER_THINGS = {"copy2", "link", "move", "remove", "rename", "replace"}
"""Those of them that strings, lists, tensors and structs have too: only such of `os` and `shutil` are meant."""
OWN_FILES = "attnfuzz.own_files"
NOT_OWN_FILES = {
    # a descriptor of a file that is open already
    "attnfuzz.internal_errors": {
        "open(descriptor, 'w', encoding='utf-8', errors='backslashreplace')",
        "os.unlink(path)",
    },
    "attnfuzz.isolation.serve": {
        "open(1, 'w', buffering=1, errors='backslashreplace', closefd=False)",
        "open(2, 'w', buffering=1, errors='backslashreplace', closefd=False)",
    },
    "attnfuzz.cli.output": {
        "open(descriptor, mode, errors='replace', closefd=False)",
        "os.open(os.devnull, flags)",
        "os.open(os.devnull, os.O_WRONLY)",
    },
    "attnfuzz.sanitizer.running": {"os.fdopen(OwnFolder(output.parent).create(output.name), 'wb')"},
    "attnfuzz.sanitizer.target": {"os.fdopen(OwnFolder(place.parent).create(place.name), 'wb', buffering=0)"},
    # no file on a disk
    "attnfuzz.report.terminal": {"os.open(os.devnull, os.O_WRONLY)"},
    "attnfuzz.isolation.process": {"Path('/proc/self/oom_score_adj').write_text('1000')"},
    # what killed processes left among temporary files: private, of this user, and called as only attnfuzz calls them
    "attnfuzz.isolation.claims": {"shutil.rmtree(folder, ignore_errors=True)"},
}
"""Calls that change a disk, or look as if they did, outside of `OWN_FILES`, and why each of them may be there."""

# What an oracle says of a failure, in words; and what holds it.
WORDS = {"kind", "message", "features"}
SPEAKERS = ("failure", "finding", "record", "sight", "symptom", "bug", "raised", "again")
OF_STRINGS = {"startswith", "endswith", "partition", "rpartition", "split", "removeprefix", "removesuffix", "find"}
IDENTITY = "attnfuzz.identity"


def is_said(node: ast.AST) -> bool:
    """Whether an expression is the words of an oracle, or a part of them."""
    match node:
        case ast.Attribute(value=value, attr=name) if name in WORDS:
            return ast.unparse(value).endswith(SPEAKERS)
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in OF_STRINGS:
            return is_said(value)
        case ast.Subscript(value=value):
            return is_said(value)
    return False


def word_tests(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Comparisons of what an oracle says, and what takes it apart; sets of features may be parts of one another."""
    for node in nodes:
        if isinstance(node, ast.Compare):
            said = list(filter(is_said, (node.left, *node.comparators)))
            are_sets = all(isinstance(one, ast.Attribute) and one.attr == "features" for one in said)
            if said and not (are_sets and not any(isinstance(one, ast.In | ast.NotIn) for one in node.ops)):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_said(node):
            yield ast.unparse(node)


def changes_disk(call: ast.Call) -> bool:
    """Whether a call writes, makes or removes a file by its path, as far as its text can tell."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    of = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if name == "open":
        if of == "os":
            return any(flag in ast.unparse(call) for flag in ("WR", "CREAT", "TRUNC", "APPEND", "TMPFILE", ", flags"))
        return any(set(mode) & set("wax+") or not mode for mode in modes_of(call, position=0 if of else 1))
    if name == "fdopen":
        return any(set(mode) & set("wax+") or not mode for mode in modes_of(call, position=1))
    is_path_method = name in {"rename", "replace"} and len(call.args) == 1 and not call.keywords  # of strings: two
    return name in CHANGING and (name not in OF_OTHER_THINGS or of in {"os", "shutil"} or is_path_method)


def modes_of(call: ast.Call, *, position: int) -> Iterator[str]:
    """That of a call of ``open``, if it has any; empty for one that only the running program knows."""
    given = [*call.args[position : position + 1], *(one.value for one in call.keywords if one.arg == "mode")]
    yield from (one.value if isinstance(one, ast.Constant) and isinstance(one.value, str) else "" for one in given)


def assigned_names(path: Path) -> set[str]:
    """The names that the module's own statements set."""
    targets = (target for node in parsed(path).body if isinstance(node, ast.Assign) for target in node.targets)
    return {target.id for target in targets if isinstance(target, ast.Name)}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] != "attnfuzz":  # kernels and strategies are reached through links in attnfuzz
        parts = ("attnfuzz", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def rank(module: str) -> int:
    prefix = module
    while prefix not in RANKS:
        prefix, _, last = prefix.rpartition(".")
        if not prefix:
            raise LookupError(f"{module}: no rank for {last}; add it to RANKS")
    return RANKS[prefix]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(path)))


def within(folder: str) -> list[Path]:
    return [path for path in SOURCES if path.is_relative_to(ROOT / folder)]


def foreign_imports(path: Path, allowed: set[str], *, ours: tuple[str, ...]) -> set[str]:
    """What a file imports beside the standard library, the packages of ``allowed`` and our own modules of ``ours``."""
    known = {*allowed, *sys.stdlib_module_names}
    return {
        name for name in imported_modules(path) if name.partition(".")[0] not in known and not name.startswith(ours)
    }


def imported_modules(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def unnamed_tensors(nodes: Iterable[ast.AST], what: set[str]) -> Iterator[str]:
    """Calls that make a tensor and leave the device, or the dtype of numbers, to PyTorch's defaults."""
    for node in nodes:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
        ):
            maker, named = node.func.attr, {keyword.arg for keyword in node.keywords}
            wanted = what - {"dtype"} if maker in OF_INTEGERS else what
            if maker in OF_INTEGERS | OF_NUMBERS and not wanted <= named:
                yield ast.unparse(node)


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """All of a module but what its functions do when they are called."""
    yield node
    is_function = isinstance(node, ast.FunctionDef | ast.Lambda)
    for name, part in ast.iter_fields(node):
        for child in () if is_function and name == "body" else part if isinstance(part, list) else [part]:
            if isinstance(child, ast.AST):
                yield from run_at_import(child)


def test_every_module_has_a_rank() -> None:
    """A new top-level module would escape the import rules."""
    names = {".".join(module_name(path).split(".")[:2]) for path in SOURCES}
    assert names <= set(RANKS)


def test_imports_point_downwards() -> None:
    """A lower layer would depend on a higher one, so that neither could be used or understood alone."""
    for path in SOURCES:
        importer = module_name(path)
        ours = [name for name in imported_modules(path) if name.partition(".")[0] == "attnfuzz"]
        higher = [name for name in ours if rank(name) > rank(importer)]
        assert importer == "attnfuzz" or not higher, f"{importer} imports {higher}"


def test_tensors_are_made_without_facets() -> None:
    """What a case holds would depend on how it is shrunk and told."""
    for path in SOURCES:
        stranger = STRANGERS.get(".".join(module_name(path).split(".")[:2]))
        imported = [name for name in imported_modules(path) if stranger and name.startswith(stranger)]
        assert not imported, f"{path} imports {imported}"


def test_a_case_goes_through_a_campaign_in_one_direction() -> None:
    """Whoever follows one case from draw to file would have to walk back."""
    for path in within("attnfuzz/campaign"):
        here = [STATIONS.index(part) for part in module_name(path).split(".") if part in STATIONS]
        names = (name.split(".")[2] for name in imported_modules(path) if name.startswith("attnfuzz.campaign."))
        later = [name for name in names if here and name in STATIONS and STATIONS.index(name) > here[0]]
        assert not later, f"{path} imports {later}"


def test_kernels_import_only_torch_and_triton() -> None:
    """A bundled kernel could not be pasted into another project; only the file of declarations needs attnfuzz."""
    for path in within("kernels"):
        public = {"attnfuzz"} if path.stem == "bundled" else set[str]()
        assert foreign_imports(path, {"torch", "triton"}, ours=("attnfuzz.kernels",)) <= public, path


def test_strategies_import_only_hypothesis_and_cases() -> None:
    """Drawing a case would need torch or a kernel's module in the driver."""
    for path in within("strategies"):
        assert not foreign_imports(
            path, {"hypothesis"}, ours=("attnfuzz.cases", "attnfuzz.problems", "attnfuzz.strategies")
        ), path


def test_modules_say_what_they_are_for() -> None:
    """A reader would have to open each of hundreds of files to find the one that knows something."""
    for path in SOURCES:
        assert ast.get_docstring(parsed(path)), f"{path} must start with a docstring"


def test_docstrings_say_who_does_what() -> None:
    """A reader would guess what "Of those" and "The same" speak of."""
    for path in SOURCES:
        documented = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)]
        texts = [text for node in documented if (text := ast.get_docstring(node))]
        headless = [text for text in texts if re.match(r"(Of|What|The same|That|Those)\b", text)]
        assert not headless, f"{path}: {headless}"


def test_only_what_users_import_lists_its_names() -> None:
    """Each name of a module of the house would be written twice, and each change of one be two."""
    listing = {path.relative_to(ROOT).as_posix() for path in SOURCES if "__all__" in assigned_names(path)}
    kernels = {name for name in listing if name.startswith("kernels/")}  # which are pasted into other projects
    assert listing - kernels == {"attnfuzz/__init__.py", "attnfuzz/families/__init__.py"}


def test_every_test_says_what_it_protects() -> None:
    """A failing test would not say what is broken."""
    for path in TESTS:
        functions = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]
        silent = [one.name for one in functions if one.name.startswith("test_") and not ast.get_docstring(one)]
        assert not silent, f"{path}: {silent}"


def test_nothing_is_unpickled_or_evaluated() -> None:
    """Loading somebody's case or verdict could run their code."""
    for path in (*SOURCES, *TESTS):
        assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & set(imported_modules(path)), path
        calls = [node.func for node in nodes_of(path) if isinstance(node, ast.Call)]
        assert not {"eval", "exec"} & {func.id for func in calls if isinstance(func, ast.Name)}, path


def test_files_are_written_made_and_removed_in_one_place() -> None:
    """A symbolic link in a folder that was handed on would be followed, and a file anywhere overwritten or removed."""
    for path in SOURCES:
        if (module := module_name(path)) == OWN_FILES:
            continue
        calls = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
        found = {ast.unparse(call) for call in calls if changes_disk(call)}
        assert found == NOT_OWN_FILES.get(module, set()), path
        named = [node for node in nodes_of(path) if isinstance(node, ast.ImportFrom)]
        hidden = [alias.name for node in named if node.module in ("os", "shutil") for alias in node.names]
        assert not CHANGING & set(hidden), path


@pytest.mark.parametrize(
    "text",
    [
        "path.write_text('')", "path.open('w')", "path.open(mode='ab')", "open(path, 'r+')", "open(path, mode)",
        "path.unlink()", "path.replace(other)", "path.rename(other)", "os.replace(a, b)", "os.remove(path)",
        "shutil.rmtree(path)", "shutil.move(a, b)", "os.open(path, os.O_RDWR | os.O_CREAT)", "os.open(path, flags)",
        "path.mkdir()", "path.touch()", "os.fdopen(descriptor, 'wb')",
    ],
)  # fmt: skip
def test_what_changes_a_disk_is_recognised(text: str) -> None:
    """The test above would see nothing."""
    (statement,) = ast.parse(text).body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    assert changes_disk(statement.value)


def test_what_an_oracle_says_is_read_in_one_place() -> None:
    """A bug would be told apart by words, here in one way and there in another, and be several findings."""
    for path in SOURCES:
        module = module_name(path)
        if not module.startswith(IDENTITY):
            assert not set(word_tests(nodes_of(path))), path


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("failure.kind == 'bits'", 1), ("now.failure.kind.startswith('read ')", 1), ("x in finding.features", 1),
        ("finding.message.partition(';')[0]", 1), ("mask.kind == 'tree'", 0), ("bug.features <= found", 0),
        ("report(failure.message)", 0),
    ],
)  # fmt: skip
def test_tests_of_what_an_oracle_says_are_recognised(text: str, count: int) -> None:
    """The test above would see nothing."""
    assert len(list(word_tests(ast.walk(ast.parse(text))))) == count


def test_whole_folders_are_removed_only_by_the_process_that_made_them() -> None:
    """A folder of a user's that is called as one of attnfuzz's would be gone with all that lies in it."""
    removers = {
        (module_name(path), function.name)
        for path in SOURCES
        if "rmtree" in path.read_text(encoding="utf-8")
        for function in nodes_of(path)
        if isinstance(function, ast.FunctionDef) and "rmtree" in ast.unparse(function)
    }
    # the first refuses any other folder; the second is for what a killed process left among temporary files
    assert removers == {(OWN_FILES, "remove_all"), ("attnfuzz.isolation.claims", "_remove_leftovers")}


def test_new_tensors_name_their_device_and_dtype() -> None:
    """Where the user's code sets PyTorch's default device or dtype, a tensor would be made there, or be rounded."""
    for path in SOURCES:
        unnamed = list(unnamed_tensors(nodes_of(path), {"device", "dtype"}))
        assert not unnamed, f"{path}: {unnamed}"


def test_tests_of_kernels_make_tensors_on_their_device() -> None:
    """Compiled for a GPU, on which such tests make their tensors, they would pass some of the host to a kernel."""
    for path in sorted((ROOT / "tests" / "kernels").glob("*.py")):
        tree = parsed(path)
        unnamed = list(unnamed_tensors(run_at_import(tree), {"device"}))
        assert not unnamed, f"{path}: {unnamed}"
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        generators = [call for call in calls if ast.unparse(call.func) == "torch.Generator"]
        assert all(call.args or call.keywords for call in generators), path


def test_mistakes_are_raised_not_asserted() -> None:
    """A caller's mistake would pass under ``python -O``, and show as a bare AssertionError otherwise."""
    for path in SOURCES:
        asserted = [node.lineno for node in nodes_of(path) if isinstance(node, ast.Assert)]
        assert not asserted, f"{path}: lines {asserted}"


@pytest.mark.parametrize("module", ["attnfuzz", *LIGHT])
def test_import_stays_light(module: str) -> None:
    """Importing the public package or the driver's modules would load torch, triton or hypothesis: seconds to wait."""
    script = f"import {module}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert not HEAVY & set(done.stdout.split())


def test_public_names_resolve() -> None:
    """A name in attnfuzz.__all__ would raise when it is first used."""
    import attnfuzz

    for name in attnfuzz.__all__:
        getattr(attnfuzz, name)


def test_shapes_in_signatures_are_checked() -> None:
    """The shapes that signatures state would be no more than comments."""
    import torch
    from jaxtyping import TypeCheckError
    from jaxtyping import config as shape_checks

    from attnfuzz.numerics import error_ratio

    two, one = torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    shape_checks.update("jaxtyping_disable", False)  # by day most tests are not checked
    with pytest.raises(TypeCheckError, match="shape"):
        error_ratio(two, one, two)
