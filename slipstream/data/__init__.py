"""Datasets: where prompts come from, what they must look like, and the order in which they are visited.

Imports neither torch nor, until a dataset is asked for, `datasets`.
"""

from slipstream.data.identity import fingerprint, prompt_order
from slipstream.data.section import held_out_data, training_data
from slipstream.data.source import DataError, check_conversational, load_dataset_source

__all__ = [
    "DataError",
    "check_conversational",
    "fingerprint",
    "held_out_data",
    "load_dataset_source",
    "prompt_order",
    "training_data",
]
