"""Puts others in the place of server and learner in every Python that has this folder on its path, where a test asks to.

Flow processes of a worker, `slipstream supervise` in the background and the command line all start their jobs by
themselves: no test can reach into those otherwise. STANDIN_LEADERS says which: "standins" (standin_roles.py) or "doubles"
(tests/doubles, whose model is no file that could be looked for). Nothing is imported until the process imports it.
"""

import os
import sys
from importlib.machinery import PathFinder

ROLES = ("server", "learner")
LEADERS = {
    "standins": {role: f"standin_roles:{role}" for role in ROLES},
    "doubles": {role: f"tests.doubles.{role}:run" for role in ROLES},
}
ASKED = os.environ.get("STANDIN_LEADERS", "")
DIES_IN_PREPARE = os.environ.get("STANDIN_DIES_IN_PREPARE", "")


def _leaders(module):
    module.LEADERS.update(LEADERS[ASKED])


def _no_look(module):
    module.check = lambda config: []


def _dies_in_prepare(module):
    """Kill the process that prepares the run whose name stands in the file, once."""
    check = module.check

    def dies(config):
        try:
            with open(DIES_IN_PREPARE) as file:
                named = file.read() == config.name
        except OSError:
            named = False
        if named:
            os.unlink(DIES_IN_PREPARE)
            os.kill(os.getpid(), 9)
        return check(config)

    module.check = dies


AFTER = {}
if ASKED:
    if ASKED not in LEADERS:
        raise SystemExit(f"STANDIN_LEADERS = {ASKED!r} is none of {', '.join(LEADERS)}")
    AFTER["cluster.entry"] = _leaders
    if ASKED == "doubles":
        AFTER["slipstream.preflight"] = _no_look
if DIES_IN_PREPARE:
    AFTER["tasks.prepare"] = _dies_in_prepare


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in AFTER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            AFTER[name](module)

        spec.loader.exec_module = exec_module
        return spec


if AFTER:
    sys.meta_path.insert(0, Finder)
