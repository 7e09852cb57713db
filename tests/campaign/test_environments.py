"""attnfuzz.campaign.environments and bisection: what is said of environments that differ, and which of them are run."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnfuzz.campaign.environments import Ending, EnvironmentOutcome, bisect, difference, names_of
from attnfuzz.isolation.pythons import Python


def python(name: str, **versions: str) -> Python:
    return Python(Path("/", name), {"python": "3.11.7", "torch": "2.13.0", "triton": "3.7.1"} | versions)


def outcome(where: Python, ending: Ending, symptom: str = "", device: str = "cpu") -> EnvironmentOutcome:
    return EnvironmentOutcome(where, device, ending, symptom)


OLD, NEW = python("old", triton="3.6.0"), python("new", triton="3.9.0")


def test_only_what_differs_is_told() -> None:
    """The version that matters would stand among twenty that are the same."""
    told = difference([outcome(OLD, "passes"), outcome(NEW, "fails", "accuracy/out")], "mine.py:k")
    assert told == "passes with Triton 3.6.0, fails with Triton 3.9.0"


def test_several_versions_and_failures_are_kept_apart() -> None:
    """A reader could not tell which version goes with which, or that the two failures are not the same."""
    new = python("new", triton="3.9.0", torch="2.15.0")
    told = difference([outcome(OLD, "fails", "accuracy/out"), outcome(new, "fails", "exception/TypeError")], "k")
    assert told == (
        "fails accuracy/out with torch 2.13.0 and Triton 3.6.0; "
        "fails exception/TypeError with torch 2.15.0 and Triton 3.9.0"
    )


def test_environments_that_agree_are_named_together_and_say_nothing_alone() -> None:
    """Each case would be called a difference, or the reader would have to look for the one that is."""
    third = python("third", triton="3.8.0")
    assert difference([outcome(OLD, "passes"), outcome(NEW, "passes")], "k") == ""
    told = difference([outcome(OLD, "passes"), outcome(third, "passes"), outcome(NEW, "fails")], "k")
    assert told == "passes with Triton 3.6.0 and with Triton 3.8.0, fails with Triton 3.9.0"


def test_a_device_that_differs_is_told() -> None:
    """An environment whose torch sees no GPU would have its versions blamed for what the interpreter does."""
    told = difference([outcome(OLD, "passes"), outcome(NEW, "fails", device="a GPU")], "k")
    assert told == "passes with Triton 3.6.0 on cpu, fails with Triton 3.9.0 on a GPU"


@pytest.mark.parametrize(
    ("target", "versions", "names"),
    [
        ("vllm:decode", ({"vllm": "0.19", "rich": "1"}, {"vllm": "0.20", "rich": "2"}), ["vllm 0.19", "vllm 0.20"]),
        ("flashinfer:d", ({"flashinfer-python": "1"}, {}), ["flashinfer-python 1", "no flashinfer-python"]),
        ("my_engine.sub:k", ({"my-engine": "1"}, {"my-engine": "2"}), ["my-engine 1", "my-engine 2"]),
        ("mine.py:k", ({"rich": "1"}, {"rich": "2"}), ["rich 1", "rich 2"]),
        ("mine.py:k", ({}, {}), ["/0", "/1"]),
    ],
)
def test_an_engines_release_names_its_environment(
    target: str, versions: tuple[dict[str, str], ...], names: list[str]
) -> None:
    """Two releases of an engine would be compared under names that say nothing, or a printer's version be blamed."""
    assert names_of([python(str(n), **one) for n, one in enumerate(versions)], target) == names


def test_the_same_versions_in_two_places_are_told_by_their_paths() -> None:
    """A build of one's own would have the name of the release that it is compared with."""
    names = names_of([OLD, python("mine", triton="3.6.0"), NEW])
    assert names == ["Triton 3.6.0 (/old)", "Triton 3.6.0 (/mine)", "Triton 3.9.0"]


def found(endings: str) -> tuple[str, int, str | None]:
    """What is said of environments where a case passes (p), fails (f) or is not judged (n), and how many ran."""
    meaning: dict[str, Ending] = {"p": "passes", "f": "fails", "n": "is not judged"}
    pythons = [python(f"env{n}", triton=f"3.{n}") for n in range(len(endings))]
    result = bisect(pythons, lambda one: outcome(one, meaning[endings[pythons.index(one)]]), target="k")
    failing = None if result.first_failing is None else result.first_failing.path.name
    return str(result), len(result.ran), failing


@pytest.mark.parametrize(
    ("endings", "said", "runs", "failing"),
    [
        ("pf", "first fails with Triton 3.1 (/env1); passes with Triton 3.0 (/env0)", 2, "env1"),
        ("pppppfff", "first fails with Triton 3.5 (/env5); passes with Triton 3.4 (/env4)", 5, "env5"),
        ("fffppppp", "first passes with Triton 3.3 (/env3); fails with Triton 3.2 (/env2)", 5, "env0"),
        (
            "ppnff",
            "first fails with Triton 3.3 (/env3); passes with Triton 3.1 (/env1); "
            "is not judged with Triton 3.2 (/env2)",
            5,
            "env3",
        ),
        ("npfn", "first fails with Triton 3.2 (/env2); passes with Triton 3.1 (/env1)", 4, "env2"),
        ("pp", "passes everywhere: with Triton 3.0 (/env0) and with Triton 3.1 (/env1)", 2, None),
        ("pfp", "fails with Triton 3.1 (/env1), though it passes with the first and the last", 3, "env1"),
        (
            "fpf",
            "already fails with Triton 3.0 (/env0), as with Triton 3.2 (/env2); begin with an older environment",
            2,
            "env0",
        ),
        ("np", "passes wherever it is judged: with Triton 3.1 (/env1)", 2, None),
        ("nn", "is judged in no environment: ", 2, None),
    ],
)  # fmt: skip
def test_the_first_that_fails_is_found(endings: str, said: str, runs: int, failing: str | None) -> None:
    """The wrong release would be blamed, a case that comes and goes be taken for a change, or all of them be run."""
    assert found(endings) == (said, runs, failing)


def test_halving_takes_few_runs() -> None:
    """Each of sixty-four nightly builds would be run."""
    assert found("p" * 40 + "f" * 24)[1] <= 8
