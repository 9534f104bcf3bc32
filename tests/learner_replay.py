"""The real trainer on made-up groups, in float64 and without a server, and what each optimizer step did."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from slipstream.algorithm.advantages import group_advantages
from slipstream.config import AsyncGRPOConfig
from slipstream.learner.checkpoint import REMAINDER_FILE, load_samples
from slipstream.learner.plan import PlannedMicroBatch, Share, StepPlan, make_plan
from slipstream.learner.replay import ReplayPipeline
from slipstream.learner.reporter import Reporter
from slipstream.learner.trainer import AsyncGRPOTrainer
from slipstream.packing.sample import EMPTY, NOT_GENERATED, Sample
from slipstream.packing.trie import pack
from slipstream.rollout.types import FAILED, GroupResult
from tests import reference
from tests.models import byte_tokenizer

VOCABULARY = 32
LEARNING_RATE = 0.1
BOUNDS = {"vllm_importance_sampling_clip_min": 0.6, "vllm_importance_sampling_clip_max": 2.0}


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """A two-layer Qwen3 with far from uniform predictions; in float64, RMS norms are too."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.25,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return reference.float64_model(model) if dtype == torch.float64 else model


def made_up_sample(
    rng: np.random.Generator,
    input_ids: Sequence[int],
    trained: Sequence[bool],
    head_size: int,
    candidates: int | None = None,
    **scalars: Any,
) -> Sample:
    """A sample of a sampler that has nothing to do with the policy, so ratios lie on both sides of any bounds.

    `candidates`: most tokens of the set that each token is drawn from, of which the sampled one is always one.
    """
    ids, mask = np.asarray(input_ids, np.int32), np.asarray(trained, np.bool_)
    where = np.flatnonzero(mask)
    scores = rng.normal(size=(len(where), VOCABULARY)) * 1.5
    sets: dict[str, Any] = {}
    if candidates is not None:
        members = [
            np.union1d(rng.choice(VOCABULARY, rng.integers(0, candidates), replace=False), ids[i : i + 1])
            for i in where
        ]
        sets["candidate_ids"] = np.concatenate(members).astype(np.int32)
        sets["candidate_offsets"] = np.cumsum([0, *map(len, members)]).astype(np.int64)
        for at, inside in zip(scores, members, strict=True):
            at[np.setdiff1d(np.arange(VOCABULARY), inside)] = -9999.0
    log_q = (scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)).astype(np.float32)
    heads = np.argsort(-log_q, axis=1)[:, :head_size].astype(np.int32)
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[where] = log_q[np.arange(len(where)), ids[where]]
    sample = Sample(
        input_ids=ids,
        trained=mask,
        logprobs=logprobs,
        versions=np.where(mask, 0, NOT_GENERATED).astype(np.int32),
        head_ids=heads,
        head_logprobs=np.take_along_axis(log_q, heads, axis=1),
        cost=len(ids),
        **sets,
        **scalars,
    )
    sample.check()
    return sample


def made_up_group(
    number: int, generations: int, head_size: int, length: int = 1_000, candidates: int | None = None
) -> GroupResult:
    """A prompt's group: a shared prompt, completions of different lengths that branch late, some with a stretch in the
    middle that is not trained, as after a tool call. `length`: of the dataset."""
    rng = np.random.default_rng(number)
    prompt = rng.integers(3, VOCABULARY, size=rng.integers(2, 6)).tolist()
    stem = rng.integers(3, VOCABULARY, size=3).tolist()
    rewards = rng.normal(size=generations)
    samples = []
    for generation, advantage in enumerate(group_advantages(rewards)):
        completion = stem[: rng.integers(0, 4)] + rng.integers(3, VOCABULARY, size=rng.integers(1, 6)).tolist()
        trained = [False] * len(prompt) + [True] * len(completion)
        if len(completion) > 4:
            trained[len(prompt) + 2] = trained[len(prompt) + 3] = False
        samples.append(
            made_up_sample(
                rng,
                prompt + completion,
                trained,
                head_size,
                candidates,
                advantage=float(advantage),
                number=number,
                rollout_id=f"{number}-{generation}",
                reward=float(rewards[generation]),
            )
        )
    epoch, position = divmod(number, length)
    return GroupResult(number, epoch, position, position, samples, {}, cost=sum(s.cost for s in samples))


def keep_only_first(group: GroupResult) -> GroupResult:
    """The group with one sample left; the others count as failed."""
    group.dropped[FAILED] = len(group.samples) - 1
    group.samples = group.samples[:1]
    return group


def for_reference(sample: Sample) -> reference.Sample:
    """The same sample in the reference's terms. Values that the trainer holds in float32 are float32 here as well."""
    heads: list[list[int]] = [[] for _ in sample.input_ids]
    head_logprobs: list[list[float]] = [[] for _ in sample.input_ids]
    for term, position in enumerate(np.flatnonzero(sample.trained)):
        entries = sample.head_ids[term] != EMPTY
        heads[position] = sample.head_ids[term][entries].tolist()
        head_logprobs[position] = sample.head_logprobs[term][entries].tolist()
    candidates = None
    if sample.candidate_ids is not None:
        everything = list(range(VOCABULARY))
        candidates = [everything for _ in sample.input_ids]
        parts = np.split(sample.candidate_ids, sample.candidate_offsets[1:-1])
        for position, ids in zip(np.flatnonzero(sample.trained), parts, strict=True):
            candidates[position] = ids.tolist() or everything
    return reference.Sample(
        prompt_ids=sample.input_ids[:1].tolist(),
        completion_ids=sample.input_ids[1:].tolist(),
        trained=sample.trained[1:].tolist(),
        sampler_logprobs=sample.logprobs[1:].tolist(),
        advantage=float(np.float32(sample.advantage)),
        head_ids=heads[1:],
        head_logprobs=head_logprobs[1:],
        candidate_ids=candidates and candidates[1:],
    )


@dataclass
class Step:
    """One optimizer step: parameters before it, the gradient that plain SGD followed, and what it was made of.

    `micro_batches` (samples over all ranks) and `samples_per_row` (for each micro-batch, per rank) are known to rank 0.
    """

    before: dict[str, Tensor]
    gradient: dict[str, Tensor] = field(default_factory=dict)
    micro_batches: list[list[Sample]] = field(default_factory=list)
    samples_per_row: list[list[int]] = field(default_factory=list)
    loss: float = 0.0

    @property
    def samples(self) -> list[str]:
        return sorted(sample.rollout_id for batch in self.micro_batches for sample in batch)


class _Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        self.steps.append(Step(snapshot(model)))

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        step = self.steps[-1]
        after = snapshot(model)
        step.gradient = {name: (value - after[name]) / LEARNING_RATE for name, value in step.before.items()}

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.steps[-1].loss = logs["loss"]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}


def no_reward(**_: Any) -> list[float]:
    """The groups come with their advantages."""
    raise AssertionError("nothing is scored when groups are replayed")


class Ledgered(Reporter):
    """Keeps the ledger's lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def ledger(self, line: dict[str, Any]) -> None:
        self.lines.append(line)


class ReplayTrainer(AsyncGRPOTrainer):
    """Trains on given groups.

    Args:
        model: the policy.
        config: its settings.
        groups: one per prompt of the dataset, in order.
        budget: most tokens of a row.
        deal: a seed by which the samples of each micro-batch are dealt out to its rows at random; None leaves them where
            the planner put them.
        prompts: what the dataset's prompts say.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: AsyncGRPOConfig,
        groups: Sequence[GroupResult],
        budget: int,
        deal: int | None = None,
        prompts: Sequence[str] | None = None,
        **others: Any,
    ) -> None:
        texts = prompts or [str(i) for i in range(len(groups))]
        dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts])
        self.reports = Ledgered()
        super().__init__(
            model, no_reward, config, dataset, processing_class=byte_tokenizer(), reporter=self.reports, **others
        )
        self.remove_callback(PrinterCallback)
        self._groups, self._budget, self._deal = groups, budget, deal
        self._recorder = _Recorder()
        self.add_callback(self._recorder)
        self._plans: list[StepPlan | None] = []

    def make_pipeline(self, end: int | None, resumed: Any) -> ReplayPipeline:
        groups = list(self._groups)
        if resumed is not None:  # as the rollout process does: what is neither settled nor held comes again, in order
            state, path = resumed
            held = {sample.number for sample in load_samples(path / REMAINDER_FILE)}
            groups = [groups[number] for number in state.position.numbers(len(groups)) if number not in held]
        pipeline = ReplayPipeline(self, groups, self._budget, resumed)
        if self._deal is not None:
            rng = np.random.default_rng(self._deal)
            pipeline.feed.make_plan = lambda batches: dealt(make_plan(batches), self.accelerator.num_processes, rng)
        return pipeline

    def _next_step(self) -> Share | None:
        step = super()._next_step()
        if step is not None:
            self._plans.append(self._plan)
        return step

    @property
    def steps(self) -> list[Step]:
        """The optimizer steps done."""
        for step, plan in zip(self._recorder.steps, self._plans, strict=True):
            if plan is not None:
                step.micro_batches = samples_of(plan)
                step.samples_per_row = [[row.num_samples for row in batch.rows] for batch in plan.micro_batches]
        return self._recorder.steps


def samples_of(plan: StepPlan) -> list[list[Sample]]:
    """The samples of each micro-batch of a plan."""
    batches, begin = [], 0
    for batch in plan.micro_batches:
        end = begin + sum(row.num_samples for row in batch.rows)
        batches.append(plan.samples[begin:end])
        begin = end
    return batches


def dealt(plan: StepPlan, ranks: int, rng: np.random.Generator) -> StepPlan:
    """The plan with each micro-batch's samples in other rows and another order."""
    batches, order = [], []
    for batch, samples in zip(plan.micro_batches, samples_of(plan), strict=True):
        rows: list[list[Sample]] = [[] for _ in range(ranks)]
        for index in rng.permutation(len(samples)):
            rows[rng.integers(ranks)].append(samples[index])
        order += [sample for row in rows for sample in row]
        batches.append(PlannedMicroBatch([pack(row) for row in rows], batch.num_tokens, batch.imbalance))
    return StepPlan(batches, order)


def replay_config(output_dir: Path, **changes: Any) -> AsyncGRPOConfig:
    """Plain SGD on CPU without clipping, one epoch, logging each step."""
    settings: dict[str, Any] = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
        "optim": "sgd",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_staleness": 1_000,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "num_train_epochs": 1 if changes.get("max_steps", -1) < 0 else 3.0,
        "gradient_checkpointing": False,
        **BOUNDS,
    }
    return AsyncGRPOConfig(**(settings | changes))
