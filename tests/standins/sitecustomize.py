"""Puts other leaders in the place of server and learner, in every process that a test's environment asks to.

A worker starts flows, and reconciliation supervisors, by commands of their own: no test can reach into those otherwise.
"""

import os
import sys

if os.environ.get("STANDIN_LEADERS") == "standins":
    from cluster import entry

    for role in ("server", "learner"):
        entry.LEADERS[role] = f"standin_roles:{role}"
elif os.environ.get("STANDIN_LEADERS") == "doubles":
    import slipstream.preflight
    from cluster import entry

    entry.LEADERS.update(server="tests.doubles.server:run", learner="tests.doubles.learner:run")
    slipstream.preflight.check = lambda config: []


def _dies_in_prepare(module):
    """Kill the process that prepares the run whose name stands in the file, once."""
    check, path = module.check, os.environ["STANDIN_DIES_IN_PREPARE"]

    def dies(config):
        try:
            with open(path) as file:
                named = file.read() == config.name
        except OSError:
            named = False
        if named:
            os.unlink(path)
            os.kill(os.getpid(), 9)
        return check(config)

    module.check = dies


if os.environ.get("STANDIN_DIES_IN_PREPARE"):
    from importlib.machinery import PathFinder

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name != "tasks.prepare":
                return None
            spec = PathFinder.find_spec(name, path, target)
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                _dies_in_prepare(module)

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder)
