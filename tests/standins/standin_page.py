"""The command line with stand-ins for the leaders; the learner speaks of the run's secrets before it breaks."""

import os
from pathlib import Path

import standin_roles

from cluster import entry
from flows.cli.main import main
from slipstream.run_folder import RunFolder


class Leaky(standin_roles.Standin):
    """Its exit record says what its log says."""

    def end(self, code: int, reason: str) -> None:
        super().end(code, f"{reason}: {self.run.token_file.read_text().strip()}")


def learner(run_dir: Path, attempt: int) -> int:
    run = RunFolder.open(run_dir)
    token = run.token_file.read_text().strip()
    planted = os.environ.get("PLANTED", "")
    with open(run.log_file("learner", attempt), "a") as log:
        log.write(f"401 for http://127.0.0.1:9 with {token}\nHF_TOKEN=planted-hf-value\n{planted}\nthe last line\n")
    standin_roles.Standin = Leaky  # type: ignore[misc]
    return standin_roles.learner(run_dir, attempt)


entry.LEADERS["server"] = "standin_roles:server"
entry.LEADERS["learner"] = "standin_page:learner"

if __name__ == "__main__":
    main()
