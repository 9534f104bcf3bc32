"""Puts other leaders in the place of server and learner, in every process that a test's environment asks to.

A worker starts flows, and reconciliation supervisors, by commands of their own: no test can reach into those otherwise.
"""

import os

if os.environ.get("STANDIN_LEADERS") == "standins":
    from cluster import entry

    for role in ("server", "learner"):
        entry.LEADERS[role] = f"standin_roles:{role}"
elif os.environ.get("STANDIN_LEADERS") == "doubles":
    import slipstream.preflight
    from cluster import entry

    entry.LEADERS.update(server="tests.doubles.server:run", learner="tests.doubles.learner:run")
    slipstream.preflight.check = lambda config: []
