"""The command line, with stand-ins for the leaders of server and learner."""

from cluster import entry
from flows.cli.main import main

for role in ("server", "learner"):
    entry.LEADERS[role] = f"standin_roles:{role}"

if __name__ == "__main__":
    main()
