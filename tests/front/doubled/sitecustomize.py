"""Puts the doubles in the place of server and learner in every Python that starts with this folder on its path.

Flow processes of a worker, `slipstream supervise` in the background and the command line all start their jobs by
themselves; this is how they come to use the doubles. Nothing is imported until the process imports it.
"""

import os
import sys
from importlib.machinery import PathFinder

LEADERS = {"server": "tests.doubles.server:run", "learner": "tests.doubles.learner:run"}


def _doubles(module):
    module.LEADERS.update(LEADERS)


def _no_look(module):
    module.check = lambda config: []


AFTER = {"cluster.entry": _doubles, "slipstream.preflight": _no_look}


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


if os.environ.get("SLIPSTREAM_TEST_DOUBLES"):
    sys.meta_path.insert(0, Finder)
