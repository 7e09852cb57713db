"""Starts the processes of attnfuzz's own, such that no file in the working directory is taken for an installed module.

`command` gives ``python -P .../safe_start.py MODULE ARGUMENT...``, which runs the module as ``python -m`` would.
Python's -P keeps the working directory off ``sys.path``. Beyond that, relative entries of PYTHONPATH, an empty one
included, and the root of a clone come last there, behind all that is installed; and the attnfuzz that runs is the one
that this file is part of, installed or not.

Another interpreter, with packages of its own, runs ``safe_start.py --elsewhere MODULE``: where this attnfuzz is an
installed one, what lies beside it there is not for that interpreter to import.
"""

# Imports of more than sys and os wait until the path is in order.
import os
import sys

_PACKAGE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - see above
_ROOT = os.path.dirname(_PACKAGE)  # noqa: PTH120 - as above
_ELSEWHERE = "--elsewhere"


def command(module: str, *arguments: str, python: "os.PathLike[str] | None" = None) -> list[str]:
    """The command line of a process that runs ``module``, found from any working directory.

    ``python``: the interpreter, if it is to be another than this one; of Python 3.11 or newer.
    """
    interpreter = [os.fspath(python or sys.executable), "-P", os.path.join(_PACKAGE, "safe_start.py")]  # noqa: PTH118 - as above
    return [*interpreter, *([_ELSEWHERE] if python else []), module, *arguments]


def put_path_in_order(*, elsewhere: bool = False) -> None:
    """Move what depends on the working directory, and a clone's root, to the end of ``sys.path``.

    ``elsewhere``: not the folder that attnfuzz is installed in, which holds another interpreter's packages.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.environ.get("PYTHONPATH") else []
    last = [os.path.abspath(entry) for entry in entries if not os.path.isabs(entry)]  # noqa: PTH100, PTH117
    is_clone = os.path.isfile(os.path.join(_ROOT, "pyproject.toml"))  # noqa: PTH113, PTH118
    if is_clone or (_ROOT not in sys.path and not elsewhere):
        last.append(_ROOT)
    sys.path[:] = [entry for entry in sys.path if entry not in last] + list(dict.fromkeys(last))


def _load_package() -> None:
    """Have ``attnfuzz`` be this one, whatever of that name ``sys.path`` leads to."""
    import importlib.util

    where = os.path.join(_PACKAGE, "__init__.py")  # noqa: PTH118 - as above
    spec = importlib.util.spec_from_file_location("attnfuzz", where, submodule_search_locations=[_PACKAGE])
    if spec is None or spec.loader is None:
        raise ImportError(f"{where} is not there; install attnfuzz again")
    package = importlib.util.module_from_spec(spec)
    sys.modules["attnfuzz"] = package
    spec.loader.exec_module(package)


def _main() -> None:
    del sys.argv[0]
    if elsewhere := sys.argv[0] == _ELSEWHERE:
        del sys.argv[0]
    put_path_in_order(elsewhere=elsewhere)
    _load_package()
    import runpy

    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
