"""The datasets that a run's `data` section names."""

from typing import TYPE_CHECKING, Any

from slipstream.data.source import load_dataset_source
from slipstream.run_config import DataSection

if TYPE_CHECKING:
    from datasets import Dataset


def training_data(section: DataSection) -> "Dataset":
    """The prompts to train on. Raises DataError."""
    return with_system_prompt(load_dataset_source(section.source, section.split), section.system_prompt)


def held_out_data(section: DataSection) -> "Dataset | None":
    """The held-out prompts, at most `eval_size` of them, or None. Raises DataError."""
    if section.eval_source is None:
        return None
    dataset = load_dataset_source(section.eval_source, section.eval_split)
    if section.eval_size is not None:
        dataset = dataset.select(range(min(section.eval_size, len(dataset))))
    return with_system_prompt(dataset, section.system_prompt)


def with_system_prompt(dataset: "Dataset", text: str | None) -> "Dataset":
    """Put a system message before every prompt that has none."""
    if not text:
        return dataset

    def add(row: dict[str, Any]) -> dict[str, Any]:
        prompt = row["prompt"]
        return {"prompt": prompt if prompt[0]["role"] == "system" else [{"role": "system", "content": text}, *prompt]}

    return dataset.map(add)
