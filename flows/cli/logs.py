"""Prefect's console messages go to a file of the run, not into the display."""

import logging
from pathlib import Path


class LateFileHandler(logging.Handler):
    """Appends to a file once its folder is there and the disk takes it; until then it keeps the lines."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._kept: list[str] = []
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._kept.append(self.format(record))
            if self._path.parent.is_dir():
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write("".join(f"{line}\n" for line in self._kept))
                self._kept.clear()
        except OSError:
            pass  # a full disk: they are kept, and what is shown stays readable
        except Exception:
            self.handleError(record)


def prefect_logs_to(path: Path) -> None:
    """Set Prefect's logging up, take its console handlers away, and write its log to `path`."""
    from prefect.logging.configuration import setup_logging
    from prefect.logging.handlers import PrefectConsoleHandler

    setup_logging()  # a flow does it too, but only the first call makes handlers
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "prefect"]
    for logger in [logging.getLogger(), *(logging.getLogger(name) for name in names)]:
        for handler in list(logger.handlers):
            if isinstance(handler, PrefectConsoleHandler):
                logger.removeHandler(handler)
    handler = LateFileHandler(path)
    logging.getLogger("prefect").addHandler(handler)
    logging.getLogger("submitit").addHandler(handler)
