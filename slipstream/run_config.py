"""The configuration of a run: one pydantic model, used by the TOML files, the command line and the flow's form.

Light on purpose: importing this module needs neither torch nor transformers. Each default stands here, or for the trainer in
`TrainerSection`, and nowhere else; `slipstream.config.AsyncGRPOConfig` takes its own from there.

No ``from __future__ import annotations``: Prefect resolves the types of a flow's parameters at run time.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from slipstream.config_rules import Impossible
from slipstream.config_section import MOST_DEADLINE, MOST_SECONDS, Section
from slipstream.trainer_section import TrainerSection

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class ModelSection(Section):
    """What is trained."""

    name: str = Field(
        title="Model", min_length=1, description="Hub id, or path of a folder written by save_pretrained."
    )
    revision: str | None = Field(None, title="Revision", description="Branch, tag or commit of a hub model.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "float32",
        title="Trainer dtype",
        description="Dtype of the trainer's weights. The ratio between trainer and server is sensitive to it.",
    )
    trust_remote_code: bool = Field(
        False, title="Trust remote code", description="Run Python code that ships with the model."
    )


class DataSection(Section):
    """Where prompts come from. Rows need a conversational `prompt` column; other columns reach the rewards."""

    source: str = Field(
        title="Training data",
        min_length=1,
        description="Hub id, path of a .jsonl or .parquet file or of a datasets folder, "
        "or reasoning_gym:TASK?size=N&seed=N.",
    )
    split: str = Field("train", title="Split", description="Split of a hub dataset or datasets folder.")
    shuffle: bool = Field(True, title="Shuffle", description="Visit the prompts in a new random order each epoch.")
    system_prompt: str | None = Field(
        None, title="System prompt", description="Put before every prompt that has no system message; empty: none."
    )
    eval_source: str | None = Field(
        None, title="Held-out data", description="Like the training data; never trained on. Empty: no evaluation."
    )
    eval_split: str = Field("test", title="Held-out split", description="Split of the held-out dataset.")
    eval_size: int | None = Field(
        None, title="Held-out prompts", ge=1, description="Use only the first so many held-out prompts. Empty: all."
    )


class RewardSection(Section):
    """What is rewarded: the sum of these functions."""

    functions: list[str] = Field(
        ["slipstream.rewards:accuracy_reward"],
        title="Reward functions",
        min_length=1,
        description="Each named module:function; importable where the learner runs. Their sum is the reward.",
    )
    paths: list[str] = Field(
        default_factory=list,
        title="Import paths",
        description="Folders put on the import path to find the functions, relative to where the run is started.",
    )


class ServerSection(Section):
    """The vLLM server that generates."""

    url: str | None = Field(
        None,
        title="Server that already runs",
        pattern=r"^https?://",
        examples=["http://gpu-node:8000"],
        description="Base URL of a server that somebody else started; empty: the run starts its own.",
    )
    command: list[str] = Field(
        default_factory=list,
        title="Command",
        description="Command that stands before `--model …`, for example of a container. "
        "Empty: python -m vllm.entrypoints.openai.api_server of .venv-vllm.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", title="Server dtype", description="auto: the trainer's dtype."
    )
    max_model_len: int = Field(
        4096, title="Sequence length", ge=2, description="Most tokens of prompt and completion together."
    )
    max_num_seqs: int = Field(
        256, title="Batch size", ge=1, description="Most requests that the server decodes at once."
    )
    kv_cache_memory: str | None = Field(
        None,
        title="KV cache",
        pattern=r"^[0-9]+[KMG]?$",
        examples=["20G"],
        description="Memory of the KV cache, like 512M or 20G; empty: vLLM decides (on CPU: 256M).",
    )
    gpus: int = Field(1, title="GPUs", ge=0, description="GPUs of a server node; 0: CPU.")
    tensor_parallel_size: int = Field(
        1,
        title="Tensor parallel",
        ge=1,
        description="GPUs that one engine is split over; more than a node has: it spans nodes.",
    )
    data_parallel_size: int = Field(1, title="Data parallel", ge=1, description="Engines behind one address.")
    nodes: int = Field(1, title="Nodes", ge=1, description="Server nodes.")
    enable_lora: bool = Field(False, title="LoRA adapters", description="Let the server load adapters at run time.")
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = Field(
        32, title="Largest LoRA rank", description="Rank the server reserves memory for."
    )
    extra_args: list[str] = Field(
        default_factory=list, title="More arguments", description="Passed to vLLM as they are, like --enforce-eager."
    )
    environment: list[str] = Field(
        default_factory=list, title="Environment", description="NAME=VALUE lines for the server process; no secrets."
    )
    startup_timeout: float = Field(
        1800.0, title="Start-up timeout", gt=0, le=MOST_SECONDS, description="Seconds until the server must answer."
    )
    stall_timeout: float = Field(
        600.0,
        title="Stall timeout",
        gt=0,
        le=MOST_SECONDS,
        description="Seconds that a server may not answer, or run requests without a token, until it counts as hung.",
    )

    @model_validator(mode="after")
    def _possible(self) -> "ServerSection":
        problems: list[tuple[str, Any, str]] = []
        wrong = [line for line in self.environment if "=" not in line or not line.split("=", 1)[0].isidentifier()]
        if wrong:
            problems.append(("environment", wrong, 'each entry must be "NAME=VALUE"'))
        problems += self._parallel_problems()
        if problems:
            raise Impossible(problems)
        return self

    def _parallel_problems(self) -> list[tuple[str, Any, str]]:
        """What cannot be spread over the nodes and GPUs as it was asked for."""
        tensor, data, nodes, gpus = self.tensor_parallel_size, self.data_parallel_size, self.nodes, self.gpus
        problems: list[tuple[str, Any, str]] = []
        if nodes == 1:
            if gpus and tensor > gpus:
                problems.append(("tensor_parallel_size", tensor, f"is more than gpus = {gpus}: raise gpus or lower it"))
            elif gpus and tensor * data > gpus:
                message = f"times tensor_parallel_size = {tensor} is more than gpus = {gpus}: raise gpus or lower it"
                problems.append(("data_parallel_size", data, message))
            return problems
        if self.command and self.command[-1] == "vllm.entrypoints.openai.api_server":
            message = f"has no engines without an API server, which nodes = {nodes} needs: let it end in `vllm serve`"
            problems.append(("command", self.command, message))
        if gpus == 0:
            if tensor > 1:
                problems.append(("tensor_parallel_size", tensor, "needs GPUs: set gpus, or leave it at 1"))
            if data % nodes:
                message = f"is no multiple of nodes = {nodes}: set it to {nodes}, one engine a node"
                problems.append(("data_parallel_size", data, message))
        elif tensor * data != nodes * gpus:
            way_out = f"set it to {nodes * gpus // tensor}" if nodes * gpus % tensor == 0 else "change either"
            message = f"times tensor_parallel_size = {tensor} is not nodes * gpus = {nodes} * {gpus} = {nodes * gpus}: {way_out}"
            problems.append(("data_parallel_size", data, message))
        elif gpus % tensor and tensor % gpus:
            message = (
                f"neither divides gpus = {gpus} nor is a multiple of it: an engine has to fill nodes, or fit into one"
            )
            problems.append(("tensor_parallel_size", tensor, message))
        return problems


class LearnerSection(Section):
    """The torchrun job that trains."""

    nodes: int = Field(1, title="Nodes", ge=1, description="Learner nodes.")
    processes_per_node: int = Field(1, title="Processes per node", ge=1, description="Data-parallel ranks on a node.")
    gpus: int = Field(1, title="GPUs", ge=0, description="GPUs of a learner node; 0: CPU (gloo).")
    python: str | None = Field(
        None, title="Interpreter", description="Python of the learner; empty: the one that starts the run."
    )
    use_lora: bool = Field(False, title="LoRA", description="Train a LoRA adapter instead of all weights.")
    lora_rank: int = Field(32, title="LoRA rank", ge=1, description="Rank of the adapter.")
    lora_alpha: int = Field(64, title="LoRA alpha", ge=1, description="Scale of the adapter.")
    lora_target_modules: list[str] = Field(
        ["all-linear"], title="LoRA modules", description="Modules that get an adapter."
    )
    startup_timeout: float = Field(
        1800.0,
        title="Start-up timeout",
        gt=0,
        le=MOST_DEADLINE,
        description="Seconds from a ready server until the learner's first optimizer step must have begun; an evaluation "
        "before it does not count.",
    )
    step_timeout: float = Field(
        3600.0,
        title="Step timeout",
        gt=0,
        le=MOST_DEADLINE,
        description="Seconds without any progress until the run counts as stuck.",
    )
    sync_timeout: float = Field(
        1800.0,
        title="Delivery timeout",
        gt=0,
        le=MOST_DEADLINE,
        description="Seconds that one delivery of weights may take; waiting for a server that is restarted does not count.",
    )
    save_timeout: float = Field(
        1800.0, title="Checkpoint timeout", gt=0, le=MOST_DEADLINE, description="Seconds that one checkpoint may take."
    )

    @model_validator(mode="after")
    def _possible(self) -> "LearnerSection":
        problems: list[tuple[str, Any, str]] = []
        if self.gpus and self.processes_per_node != self.gpus:
            message = (
                f"differs from gpus = {self.gpus}: one process drives one GPU, so set them equal, or gpus = 0 for CPU"
            )
            problems.append(("processes_per_node", self.processes_per_node, message))
        if self.use_lora and "lm_head" in self.lora_target_modules:
            message = "an adapter on lm_head is not supported: take it out"
            problems.append(("lora_target_modules", self.lora_target_modules, message))
        if problems:
            raise Impossible(problems)
        return self


class ClusterSection(Section):
    """Where jobs run."""

    profile: str = Field(
        "local",
        title="Cluster profile",
        min_length=1,
        description="Name of a profile in slurm/profiles (like local or slurm), or path of a profile file; in a run that a "
        "Prefect deployment starts also block:NAME, of a block.",
    )
    shape: Literal["separate", "one_allocation"] = Field(
        "separate",
        title="Shape",
        description="separate: a job for the server and one for the learner. one_allocation: one job, learner nodes "
        "first and server nodes last, that ends together.",
    )


class StorageSection(Section):
    """Where run folders lie: on storage that every node sees."""

    root: str = Field(
        "runs", title="Storage root", min_length=1, description="Folder that holds one folder per run (mode 0700)."
    )


class RecoverySection(Section):
    """What happens when a part of the run dies."""

    max_restarts: int = Field(
        5,
        title="Restarts",
        ge=0,
        description="How often a dead part is started again without a new step in between before the run fails; "
        "a fault that comes again at the same step counts twice. 0: the first fault ends the run.",
    )
    backoff: float = Field(
        10.0,
        title="Back-off",
        ge=0,
        le=86400,
        description="Seconds before the second restart in a row; doubled each time.",
    )
    backoff_max: float = Field(
        600.0, title="Largest back-off", ge=0, le=86400, description="Most seconds between a fault and its restart."
    )
    max_idle_gpu_minutes: float = Field(
        30.0,
        title="Idle GPUs",
        gt=0,
        le=MOST_SECONDS / 60,
        description="Minutes that a server may wait for a learner that is queued, held or suspended, or a learner for "
        "such a server, before its nodes are given back.",
    )
    exclude_minutes: float = Field(
        120.0,
        title="Exclusion",
        ge=0,
        le=MOST_SECONDS / 60,
        description="Minutes that a node which was at fault twice is not used.",
    )
    heartbeat_timeout: float = Field(
        180.0,
        title="Heartbeat timeout",
        ge=5,
        le=86400,
        description="Seconds without a heartbeat of a part (they come every two) until it counts as hung.",
    )
    lease: float = Field(
        60.0,
        title="Lease",
        ge=2,
        le=86400,
        description="Seconds without a sign of the process that leads the run until another takes over.",
    )
    poll: float = Field(
        10.0,
        title="Poll interval",
        ge=0.2,
        le=3600,
        description="Seconds between two questions to the cluster's scheduler, with a fifth of jitter.",
    )

    @model_validator(mode="after")
    def _possible(self) -> "RecoverySection":
        if self.backoff > self.backoff_max:
            raise Impossible([("backoff", self.backoff, f"is more than backoff_max = {self.backoff_max:g}")])
        return self


class RunConfig(Section):
    """Everything about one run."""

    name: Name = Field(
        "run",
        title="Name",
        examples=["qwen3-maths"],
        description="Start of the run's id: letters, digits, '.', '_' and '-'.",
    )
    model: ModelSection = Field(title="Model", description="What is trained.")
    data: DataSection = Field(title="Data", description="Where prompts come from.")
    reward: RewardSection = Field(default_factory=RewardSection, title="Reward", description="What is rewarded.")
    trainer: TrainerSection = Field(
        default_factory=TrainerSection, title="Trainer", description="The algorithm and the optimizer."
    )
    server: ServerSection = Field(
        default_factory=ServerSection, title="Server", description="The vLLM server that generates."
    )
    learner: LearnerSection = Field(
        default_factory=LearnerSection, title="Learner", description="The torchrun job that trains."
    )
    cluster: ClusterSection = Field(default_factory=ClusterSection, title="Cluster", description="Where jobs run.")
    storage: StorageSection = Field(
        default_factory=StorageSection, title="Storage", description="Where run folders lie."
    )
    recovery: RecoverySection = Field(
        default_factory=RecoverySection, title="Recovery", description="What happens when a part dies."
    )

    @model_validator(mode="after")
    def _possible(self) -> "RunConfig":
        problems: list[tuple[str, Any, str]] = []
        trainer, server, learner, data = self.trainer, self.server, self.learner, self.data
        if trainer.eval_steps is not None and data.eval_source is None:
            message = "needs held-out prompts: set data.eval_source, or leave it out"
            problems.append(("trainer.eval_steps", trainer.eval_steps, message))
        if data.eval_size is not None and data.eval_source is None:
            problems.append(("data.eval_size", data.eval_size, "needs data.eval_source, or leave it out"))
        if trainer.max_completion_length >= server.max_model_len:
            message = (
                f"leaves no prompt room in server.max_model_len = {server.max_model_len}: raise that or lower this"
            )
            problems.append(("trainer.max_completion_length", trainer.max_completion_length, message))
        if trainer.num_generations > server.max_num_seqs:
            message = f"is more than server.max_num_seqs = {server.max_num_seqs}, which vLLM refuses: raise that"
            problems.append(("trainer.num_generations", trainer.num_generations, message))
        if server.enable_lora and server.max_lora_rank < learner.lora_rank:
            message = f"is more than server.max_lora_rank = {server.max_lora_rank}: raise that or lower this"
            problems.append(("learner.lora_rank", learner.lora_rank, message))
        if problems:
            raise Impossible(problems)
        return self

    @property
    def world_size(self) -> int:
        """Data-parallel ranks over all learner nodes."""
        return self.learner.nodes * self.learner.processes_per_node

    def to_plain(self) -> dict[str, Any]:
        """Nested dictionaries of plain values, without the keys that are None (TOML has no null)."""
        return self.model_dump(mode="json", exclude_none=True)
