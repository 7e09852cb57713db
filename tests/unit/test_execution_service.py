"""Loading services by name."""

from pathlib import Path

import pytest

from attnfuzz.execution.service import instantiate_service, load_service

SERVICES = Path(__file__).with_name("execution_services.py")


class Echo:
    def handle(self, method: str, payload: bytes) -> bytes:
        return payload


def make_echo() -> Echo:
    return Echo()


@pytest.mark.parametrize("loaded", [Echo, Echo(), make_echo])
def test_class_object_and_function_are_services(loaded: object) -> None:
    """One of the ways to give a service would not work."""
    assert instantiate_service(loaded).handle("any", b"1") == b"1"


@pytest.mark.parametrize("loaded", [3, dict, lambda: None, {"handle": None}])
def test_what_cannot_answer_is_refused(loaded: object) -> None:
    """The mistake would show as an AttributeError at the first call."""
    with pytest.raises(TypeError, match="must have a method handle"):
        instantiate_service(loaded)


@pytest.mark.parametrize("spec", ["", "module", ":attribute", "module:", "file.py"])
def test_incomplete_name_is_refused(spec: str) -> None:
    """The wrong half of a name would be looked up."""
    with pytest.raises(ValueError, match="must read 'module:attribute'"):
        load_service(spec)


def test_module_and_file_are_found() -> None:
    """Services of installed packages or of single files could not be loaded."""
    assert load_service("attnfuzz.execution.service:load_service") is load_service
    assert type(load_service(f"{SERVICES}:ready_made")).__name__ == "Rogue"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"{SERVICES}:Nobody", "names 'Nobody', which .* does not define"),
        ("attnfuzz.execution.service:nobody", "names 'nobody', which attnfuzz.execution.service does not define"),
        ("/no/such/file.py:Service", "'/no/such/file.py' does not exist"),
    ],
)
def test_what_does_not_exist_is_named(spec: str, message: str) -> None:
    """The error would not say which name is wrong."""
    with pytest.raises(ValueError, match=message):
        load_service(spec)
