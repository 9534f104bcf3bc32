"""The files in the bed's etc folder: texts made from the description, no commands run."""

import grp
import os
import pwd
from collections.abc import Callable

from slurm.bed.description import CONTROLLER, Description

CLUSTER = "bed"
DATABASE_PORT = 3306
CPUS = 16
MEMORY_MB = 64000


def slurm_conf(bed: Description) -> str:
    folder, ctl = bed.folder, bed.address(CONTROLLER)
    accounting = (
        f"""AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={ctl}
AccountingStoragePass={bed.munge_socket}
AccountingStorageTRES=gres/gpu"""
        if bed.accounting
        else "AccountingStorageType=accounting_storage/none"
    )
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={name} NodeAddr={bed.address(name)} CPUs={CPUS} Boards=1 SocketsPerBoard=1"
        f" CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory={MEMORY_MB} Gres=gpu:{bed.gpus} State=UNKNOWN"
        for name in bed.node_names
    )
    return f"""ClusterName={CLUSTER}
SlurmctldHost={CONTROLLER}({ctl})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job is requeued from a lost node only when its credential has expired: 120 s by default.
AuthInfo=socket={bed.munge_socket},cred_expire=12
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
ProctrackType=proctrack/{"cgroup" if bed.cgroup else "linuxproc"}
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=100000
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
SlurmctldTimeout=10
SlurmdTimeout={bed.node_timeout}
InactiveLimit=0
KillWait=3
MinJobAge=300
BatchStartTimeout=10
MessageTimeout=5
ReturnToService=2
GresTypes=gpu
{accounting}
{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=main Default=YES PriorityTier=10
PartitionName=low PriorityTier=1 PreemptMode=REQUEUE GraceTime={bed.grace_seconds}
PartitionName=spot PriorityTier=1 PreemptMode=CANCEL GraceTime={bed.grace_seconds}
"""


def gres_conf(bed: Description) -> str:
    if not bed.gpus:
        return ""
    return f"NodeName=n[1-{bed.nodes}] Name=gpu File={bed.folder}/dev/nvidia[0-{bed.gpus - 1}]\n"


def cgroup_conf(bed: Description) -> str:
    return f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={bed.folder}/cgroup\nCgroupAutomount=no\n"


def slurmdbd_conf(bed: Description) -> str:
    return f"""AuthType=auth/munge
AuthInfo=socket={bed.munge_socket}
DbdHost={CONTROLLER}
DbdAddr={bed.address(CONTROLLER)}
SlurmUser=root
DebugLevel=info
LogFile={bed.folder}/log/slurmdbd.log
PidFile={bed.folder}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={DATABASE_PORT}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
"""


def my_cnf(bed: Description) -> str:
    return f"""[mariadbd]
user=root
datadir={bed.folder}/db
socket={bed.folder}/run/mysql.sock
pid-file={bed.folder}/run/mysql.pid
log-error={bed.folder}/log/mysql.log
bind-address=127.0.0.1
port={DATABASE_PORT}
skip-name-resolve
skip-log-bin
innodb_buffer_pool_size=32M
innodb_log_file_size=8M
innodb_flush_log_at_trx_commit=2
innodb_lock_wait_timeout=900
performance_schema=OFF
max_connections=40
key_buffer_size=1M
aria_pagecache_buffer_size=1M
"""


def hosts(bed: Description) -> str:
    machines = "".join(f"{bed.address(name)} {name}\n" for name in bed.machines)
    return f"127.0.0.1 localhost\n{bed.address('host')} host\n{machines}"


def passwd(bed: Description) -> str:
    """This host's users and the bed's own."""
    there = [":".join(map(str, entry)) for entry in pwd.getpwall() if entry.pw_name not in bed.users]
    ours = [f"{name}:x:{uid}:{uid}:test bed:{bed.home(name)}:/bin/bash" for name, uid in bed.users.items()]
    return "\n".join([*there, *ours]) + "\n"


def group(bed: Description) -> str:
    there = [
        f"{entry.gr_name}:x:{entry.gr_gid}:{','.join(entry.gr_mem)}"
        for entry in grp.getgrall()
        if entry.gr_name not in bed.users
    ]
    return "\n".join([*there, *(f"{name}:x:{uid}:" for name, uid in bed.users.items())]) + "\n"


FILES: dict[str, Callable[[Description], str]] = {
    "slurm.conf": slurm_conf,
    "gres.conf": gres_conf,
    "cgroup.conf": cgroup_conf,
    "slurmdbd.conf": slurmdbd_conf,
    "my.cnf": my_cnf,
    "hosts": hosts,
    "passwd": passwd,
    "group": group,
}
SECRET = {"slurmdbd.conf"}  # slurmdbd insists


def write_all(bed: Description) -> None:
    for name, text in FILES.items():
        path = bed.path / "etc" / name
        path.write_text(text(bed))
        os.chmod(path, 0o600 if name in SECRET else 0o644)
