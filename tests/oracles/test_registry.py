"""attnfuzz.oracles.registry: each oracle is declared once, and all that others know of it follows from that."""

from __future__ import annotations

import ast
from pathlib import Path

from attnfuzz.oracles import registry
from attnfuzz.oracles.registry import DEFAULT_ORACLES, KNOWN, ORACLES, Oracle, Severity, oracle_of
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.verdict import Failure, ends_process

ROOT = Path(__file__).parents[2]
FOLDERS = ("campaign", "judging", "report", "cli", "mutation", "conformance", "testing", "sanitizer", "isolation")
ALSO_A_FIELD = {"layout", "graph_replay", "split_count", "containment", "residuals", "compose", "repaging", "sanitizer"}
"""Names that stand for other things as well: a field of cases, a promise, an option."""


def test_each_oracle_is_declared_once_and_each_of_its_modules_is_used() -> None:
    """One that is declared twice would be two by one name, and code that nothing names would never judge."""
    declared = [one for one in vars(registry).values() if isinstance(one, Oracle)]
    assert [one.name for one in declared] == list(KNOWN)
    assert all(getattr(registry, name.upper()) is one and one.description for name, one in KNOWN.items())
    folder = ROOT / "attnfuzz" / "oracles"
    modules = {str(path.relative_to(folder).with_suffix("")).replace("/", ".") for path in folder.rglob("*.py")}
    used = {one.code.partition(":")[0] for one in KNOWN.values() if one.code}
    helpers = {f"relations.{name}" for name in ("__init__", "relation", "catalogue", "fresh_copy", "own_containment")}
    assert modules - used == {"__init__", "registry", "exception", "own", "asking_own", *helpers}


def test_the_code_of_an_oracle_is_where_its_declaration_says() -> None:
    """An oracle would judge under the name of another one, or be missed where it is asked for."""
    for one in KNOWN.values():
        if one.is_relation:
            relation = one.load()
            assert isinstance(relation, Relation)
            assert relation.oracle is one
        elif one.code:
            assert callable(one.load())


def test_what_is_asked_follows_from_the_declarations() -> None:
    """`--oracle` would offer what cannot be asked for, or a search would leave out what it should ask."""
    assert set(KNOWN) - set(ORACLES) == {"sanitizer"}
    assert set(ORACLES) - set(DEFAULT_ORACLES) == {"layout", "repaging", "gqa_expansion", "split_count", "compose"}
    assert [name for name, one in KNOWN.items() if one.asked == "always"] == ["crash", "hang"]
    assert [name for name, one in KNOWN.items() if not one.judges_everywhere] == [
        "program_order",
        "delays",
        "graph_replay",
        "sanitizer",
    ]


def test_which_failures_end_the_process_follows_from_the_declarations() -> None:
    """A campaign would go on in a process that is gone, or replace one that is sound."""
    deadly = {("crash", "SIGSEGV"), ("hang", "timeout"), ("guard_page", "read after q"), ("graph_replay", "raised x")}
    sound = {("accuracy", "out"), ("guard_page", "bits"), ("exception", "raised x"), ("rows_in_range", "")}
    for oracle, kind in deadly | sound:
        failure = Failure(oracle=oracle, kind=kind, message="")
        assert ends_process(failure) is ((oracle, kind) in deadly)


def test_an_oracle_that_is_not_known_is_a_users() -> None:
    """A finding of a user's oracle would have no place in reports, or cost a process each time."""
    one = oracle_of("rows_in_range")
    assert (one.name, one.severity, one.relations) == ("rows_in_range", Severity.WRONG, ())
    assert not one.ends_process
    assert one.judges_everywhere


def test_no_module_elsewhere_spells_the_name_of_an_oracle() -> None:
    """A set of names in a far module is what nobody thinks of who adds an oracle."""
    names = set(KNOWN) - ALSO_A_FIELD
    spelt = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.value!r}"
        for folder in FOLDERS
        for path in (ROOT / "attnfuzz" / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert spelt == set()
