"""The program of a worker process: `PYTHON start.py PACKAGE FD MEMORY_MB`.

PACKAGE is the folder of the orchestrator's `paceline`, FD an inherited socket. Run by the interpreter that the
environment needs, which must not see the orchestrator's other packages: so Paceline is found by its folder alone.
Imports nothing but the standard library before that is done.
"""

import asyncio
import importlib.util
import os
import socket
import sys

NEEDED = ("msgspec", "numpy", "pydantic")


def find_paceline(package: str) -> None:
    """Make `import paceline` find exactly that folder. SystemExit says what this interpreter lacks."""
    if tuple(sys.version_info) < (3, 11):  # of the environment's interpreter, which need not be ours
        raise SystemExit(f"{sys.executable} is Python {sys.version.split()[0]}; a worker needs 3.11 or newer")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        raise SystemExit(f"{sys.executable} lacks {names}: {sys.executable} -m pip install {names}")
    spec = importlib.util.spec_from_file_location(
        "paceline", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    if spec is None or spec.loader is None:
        raise SystemExit(f"{package} is no folder of paceline")
    module = importlib.util.module_from_spec(spec)
    sys.modules["paceline"] = module
    spec.loader.exec_module(module)


def limit_memory(megabytes: int) -> None:
    """Private memory that Linux lets this process have; 0 sets no limit."""
    if megabytes:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))


def main(argv: list[str]) -> None:
    package, fd, memory = argv
    # The folder of this file holds modules of ours under names that are anybody's.
    sys.path[:] = [
        entry
        for entry in sys.path
        if os.path.abspath(entry or ".") != os.path.dirname(os.path.abspath(__file__))
    ]
    find_paceline(package)
    limit_memory(int(memory))
    from paceline.envs.workers.process import serve

    # The inherited one is for us alone: what an environment starts must not keep the connection open.
    connection = socket.socket(fileno=os.dup(int(fd)))
    os.close(int(fd))
    connection.set_inheritable(False)
    asyncio.run(serve(connection))
    # Threads of the environment that hang in a call must not keep the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
