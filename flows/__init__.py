import os

# For a flow that is called as a function where no API is configured: Prefect's own temporary server gets as long to
# start as ours does, not 20 s. It reads its settings once, when it is imported.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")
