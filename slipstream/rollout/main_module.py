"""Let the rollout process find what the user's script defined, without running its training again.

Reward functions defined in a script are pickled as `__main__.name`. multiprocessing would import the script again in the
child; a script without an `if __name__ == "__main__"` guard would then start a second training. Here the child runs the
script only up to where it makes a trainer: by then everything that it passes to the trainer is defined.
"""

import contextlib
import functools
import os
import runpy
import sys
import types
from collections.abc import Iterator
from typing import Any

_ENVIRONMENT = "SLIPSTREAM_ROLLOUT_PROCESS"


class ReachedTrainer(BaseException):
    """Raised where a script makes its trainer, in the rollout process: the rest of the script is not for us."""


def in_rollout_process() -> bool:
    return os.environ.get(_ENVIRONMENT) == "1"


def stop_here_in_rollout_process() -> None:
    """Called by the trainer's constructor."""
    if in_rollout_process():
        raise ReachedTrainer


def describe_main() -> tuple[str, str] | None:
    """How this process was started: ("module", name), ("path", file), or None (interactive)."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name and spec.name != "__main__":
        return "module", spec.name
    path = getattr(main, "__file__", None)
    return ("path", os.path.abspath(path)) if path else None


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Start a process inside this context, and multiprocessing leaves the main module alone."""
    main: Any = sys.modules["__main__"]
    saved = {name: getattr(main, name) for name in ("__spec__", "__file__") if hasattr(main, name)}
    os.environ[_ENVIRONMENT] = "1"
    try:
        main.__spec__ = None
        if hasattr(main, "__file__"):
            del main.__file__
        yield
    finally:
        os.environ.pop(_ENVIRONMENT, None)
        for name, value in saved.items():
            setattr(main, name, value)


def load_main(description: tuple[str, str] | None) -> None:
    """In the child: make the names of the parent's main module importable as `__main__`."""
    if description is None:
        return
    kind, name = description
    namespace: dict[str, Any] = {}
    try:
        run_module = functools.partial(runpy.run_module, run_name="__mp_main__", alter_sys=True)
        namespace = run_module(name) if kind == "module" else _run_path(name)
    except ReachedTrainer as reached:
        frame = reached.__traceback__
        while frame is not None:
            if frame.tb_frame.f_globals.get("__name__") == "__mp_main__":
                namespace = frame.tb_frame.f_globals
            frame = frame.tb_next
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(namespace)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _run_path(path: str) -> dict[str, Any]:
    sys.path.insert(0, os.path.dirname(path))
    module = types.ModuleType("__mp_main__")
    module.__file__ = path
    sys.modules["__mp_main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)  # what `python script.py` does
    return module.__dict__
