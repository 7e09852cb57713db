"""A service: what an executor runs for the driver, named as `module:attribute` or `path/to/file.py:attribute`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Protocol, runtime_checkable

__all__ = ["ExitAfterReply", "Service", "instantiate_service", "load_service"]


@runtime_checkable
class Service(Protocol):
    """Answers calls, one at a time, inside an executor."""

    def handle(self, method: str, payload: bytes) -> bytes:
        """The answer to `method`, a JSON document; `payload` is one too."""
        ...


class ExitAfterReply(Exception):  # noqa: N818 - control flow, like StopIteration
    """Raised by a service to answer with `body` and end its process, whose state can no longer be trusted."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self.body = body


def load_service(spec: str) -> object:
    """Import what `spec` names: a service, or a class or function without arguments that makes one."""
    location, separator, attribute = spec.rpartition(":")
    if not separator or not location or not attribute:
        raise ValueError(f"service={spec!r} must read 'module:attribute' or 'path/to/file.py:attribute'")
    module = _load_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    try:
        loaded: object = getattr(module, attribute)
    except AttributeError:
        raise ValueError(f"service={spec!r} names {attribute!r}, which {location} does not define") from None
    return loaded


def instantiate_service(loaded: object) -> Service:
    """The service that `load_service` found, made now if it is a class or a function."""
    made = loaded() if isinstance(loaded, type) or (callable(loaded) and not isinstance(loaded, Service)) else loaded
    if not isinstance(made, Service):
        raise TypeError(f"a service must have a method handle(method, payload) -> bytes; {made!r} has none")
    return made


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"service file {str(path)!r} does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
