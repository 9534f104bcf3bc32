"""How a command's errors are told: a message and an exit code, never a traceback. Also where RUN is looked up."""

import contextlib
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from slipstream.run_folder import RunFolder
    from tasks.sweep_folder import SweepFolder

NOBODY_READS = 141  # as a process that SIGPIPE has ended
HOME = Path(__file__).resolve().parents[2]
SET = click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Change a setting.")


def not_empty(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Refuse an empty text, as of a shell's variable that is not set: it is not meant to be the default."""
    if value == "" or (isinstance(value, tuple) and "" in value):
        raise click.BadParameter("'' names no folder: name one, or leave the option out")
    return value


ROOT = click.option("--root", metavar="FOLDER", callback=not_empty, help="Storage root that RUN is looked up in.")


def fail_plainly(command: Callable[..., int]) -> Callable[..., None]:
    """Turn a command's result into the exit code, and errors into a message: 2 for a refusal, 1 for anything else."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        from cluster.profile import ClusterError
        from flows.up.state import UpError
        from slipstream.config_file import ConfigError
        from slipstream.instance import InstanceError
        from slipstream.run_folder import RunFolderError
        from tasks.outcome import NothingToResume

        try:
            code = command(*args, **kwargs)
        except (ConfigError, RunFolderError, ClusterError, InstanceError, NothingToResume, UpError) as error:
            click.echo(f"error: {error}", err=True)
            code = 2
        except RuntimeError as error:
            home = "home directory" in str(error)  # of pathlib, for "~" and "~user"
            way_out = "a path begins with ~, and nobody knows that home: write it in full, or set HOME"
            click.echo(f"error: {way_out}" if home else f"error: {_text(error)}", err=True)
            code = 2 if home else 1
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            code = 130
        except click.ClickException:
            raise
        except BrokenPipeError:  # nobody reads on, as behind `| head`
            code = NOBODY_READS
        except OSError as error:
            click.echo(f"error: {storage_text(error)}", err=True)
            code = 1
        except Exception as error:
            click.echo(f"error: {_text(error)}", err=True)
            code = 1
        _let_go()
        sys.exit(code)

    return run


def say(text: str, err: bool = False) -> None:
    """Print a line of a command whose work goes on, also where nobody reads it."""
    with contextlib.suppress(OSError):
        click.echo(text, err=err)


def _let_go() -> None:
    """Nothing is left to be written at the exit into a pipe that nobody reads, which would be a traceback."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _text(error: Exception) -> str:
    name = type(error).__name__
    return str(error) if name in PLAIN else f"{name}: {error}"


def storage_text(error: OSError) -> str:
    """What the operating system refused, with the file and the way out."""
    import errno

    ways_out = {
        errno.EACCES: "run it as the user that owns it, or mend its permissions",
        errno.EPERM: "run it as the user that owns it, or mend its permissions",
        errno.EROFS: "mount it so that it can be written, or choose another folder",
        errno.ENOSPC: "make room there, and run the command again",
        errno.EDQUOT: "make room in your quota, and run the command again",
        errno.EISDIR: "a file belongs there: move the folder away",
        errno.ENOTDIR: "a folder belongs there: move the file away",
        errno.ENAMETOOLONG: "choose a shorter name",
    }
    way_out = ways_out.get(error.errno or 0, "look at the storage")
    if error.filename is None or error.strerror is None:
        return f"{error.strerror or error}: {way_out}"
    name = str(error.filename2 or error.filename)
    return f"{name if len(name) <= 300 else name[:299] + '…'}: {error.strerror}: {way_out}"


PLAIN = ("RunFailed", "RunCancelled", "PrefectUnavailable", "PrefectRefused", "CommandError", "NotificationBlockError")


def find_run(name: str, root: str | None) -> "RunFolder":
    """The run at a path, or with an id under the storage root. Raises RunFolderError."""
    from slipstream.run_config import StorageSection
    from slipstream.run_folder import RUN_FILE, RunFolder, RunFolderError

    storage = Path(root or StorageSection().root).expanduser()
    for path in (Path(name).expanduser(), storage / name):
        if (path / RUN_FILE).is_file():
            return RunFolder.open(path)
    if (sweep := find_sweep(name, root)) is not None:
        raise RunFolderError(
            f"{sweep.path} is a sweep, not a run: `slipstream report`, `stop` or `sweep` and this folder; its cells are runs "
            f"of their own beside it ({sweep.sweep_id}-c00 is the first), and what drives it in the background writes into "
            f"{sweep.as_run.logs / 'supervise.log'}"
        )
    known = sorted(path.parent.name for path in storage.glob(f"*/{RUN_FILE}"))
    raise RunFolderError(
        f"there is no run {name!r}: neither a run folder at that path nor a run of that id in {storage.absolute()}"
        + (f" (the newest there: {', '.join(known[-3:])})" if known else " (which holds no run); --root names another")
    )


def find_sweep(name: str, root: str | None) -> "SweepFolder | None":
    """The sweep at a path, or with an id under the storage root; None where there is none."""
    from slipstream.run_config import StorageSection
    from tasks.sweep_folder import SWEEP_FILE, SweepFolder

    storage = Path(root or StorageSection().root).expanduser()
    found = (path for path in (Path(name).expanduser(), storage / name) if (path / SWEEP_FILE).is_file())
    return next((SweepFolder(path) for path in found), None)
