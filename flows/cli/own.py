"""How this command line is started again, for children that outlive it."""

import os
import sys

HERE = "from flows.cli.main import main; main()"


def own_command() -> list[str]:
    """What stands before the arguments of a command that is started as this process was: by script or by module."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name and sys.argv and sys.argv[0] not in ("-c", ""):
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    script = sys.argv[0] if sys.argv else ""
    if os.path.isfile(script) and os.path.basename(script) == "slipstream":
        return [sys.executable, os.path.abspath(script)]
    return [sys.executable, "-c", HERE]
