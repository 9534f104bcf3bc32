"""Why a job waits, in plain words, and whether it ever can start."""

# Reasons that no waiting mends, with what to do. All others are left to time: priorities, limits that others' jobs use up,
# nodes that come back, reservations that begin.
HOPELESS = {
    "PartitionTimeLimit": "the partition does not allow the profile's time_limit: lower it or choose another partition",
    "PartitionNodeLimit": "the partition does not allow that many nodes: lower server.nodes / learner.nodes or choose another "
    "partition",
    "PartitionConfig": "the partition has no nodes that fit: look at nodes, gpus, cpus_per_task and memory_gb",
    "BadConstraints": "no node has what is asked for: look at gpus, constraint, cpus_per_task and memory_gb",
    "AccountNotAllowed": "the account may not use this partition: change account or partition in the profile",
    "QOSNotAllowed": "the QoS may not be used in this partition: change qos or partition in the profile",
    "InvalidAccount": "SLURM does not know the account: change account in the profile",
    "InvalidQOS": "SLURM does not know the QoS: change qos in the profile",
    "AssocMaxWallDurationPerJobLimit": "the account does not allow the profile's time_limit: lower it",
    "AssocMaxNodePerJobLimit": "the account does not allow that many nodes in one job: lower server.nodes / learner.nodes",
    "AssocMaxCpuPerJobLimit": "the account does not allow that many CPUs in one job: lower cpus_per_task",
    "AssocMaxMemPerJob": "the account does not allow that much memory in one job: lower memory_gb",
    "AssocMaxGRESPerJob": "the account does not allow that many GPUs in one job: lower gpus or nodes",
    "QOSMaxWallDurationPerJobLimit": "the QoS does not allow the profile's time_limit: lower it or choose another QoS",
    "QOSMaxNodePerJobLimit": "the QoS does not allow that many nodes in one job: lower server.nodes / learner.nodes",
    "QOSMaxCpuPerJobLimit": "the QoS does not allow that many CPUs in one job: lower cpus_per_task",
    "QOSMaxMemoryPerJob": "the QoS does not allow that much memory in one job: lower memory_gb",
    "QOSMaxGRESPerJob": "the QoS does not allow that many GPUs in one job: lower gpus or nodes",
    "QOSMinGRES": "the QoS wants more GPUs in a job: choose another QoS",
    "QOSMinCpuNotSatisfied": "the QoS wants more CPUs in a job: raise cpus_per_task or choose another QoS",
    "DependencyNeverSatisfied": "what it depends on has failed: it never starts",
    "DeadLine": "its deadline cannot be met any more",
    "ReservationDeleted": "its reservation was deleted: change reservation in the profile",
}


def hopeless(queue_reason: str) -> str:
    """Why a waiting job can never start, in plain words with the way out; '' if it still may."""
    word = queue_reason.strip().strip("()").split(",")[0].split(" ")[0]
    # MaxTRESPerJob variants have one name a resource: "QOSMaxGRESPerJob", "QOSMaxLicensePerJob", …
    return HOPELESS.get(word) or (
        f"{word}: one job may not ask for that much: ask for less, or choose another account or QoS"
        if word.startswith(("QOSMax", "AssocMax")) and word.removesuffix("Limit").endswith("PerJob")
        else ""
    )
