"""The integrations that `report_to` names: which there are, what each needs, and where a run keeps its files."""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

# name in report_to -> the modules of which one must be there, and what to install
INTEGRATIONS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "azure_ml": (("azureml.core", "azureml"), "azureml-mlflow"),
    "clearml": (("clearml",), "clearml"),
    "codecarbon": (("codecarbon",), "codecarbon"),
    "comet_ml": (("comet_ml",), "comet-ml"),
    "dagshub": (("dagshub",), "dagshub"),
    "dvclive": (("dvclive",), "dvclive"),
    "flyte": (("flytekit",), "flytekit"),
    "kubeflow": (("kubeflow",), "kubeflow"),
    "mlflow": (("mlflow",), "mlflow"),
    "neptune": (("neptune",), "neptune"),
    "swanlab": (("swanlab",), "swanlab"),
    "tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"),
    "trackio": (("trackio",), "trackio"),
    "wandb": (("wandb",), "wandb"),
}
PROJECT = "slipstream"


def report_problem(name: str) -> str | None:
    """Why nothing can be reported to `name` from this interpreter, with the way out; None where it can."""
    if name in ("none", "all"):  # "all" is what is installed
        return None
    if name not in INTEGRATIONS:
        return f"there is no integration {name!r}: choose among {', '.join(INTEGRATIONS)}"
    modules, package = INTEGRATIONS[name]
    if any(_is_there(module) for module in modules):
        return None
    return f"{name} is not installed here: run `pip install {package}` where the learner runs, or leave it out"


def report_problems(names: Sequence[str]) -> list[str]:
    """Why it cannot be reported to these; once each."""
    found = [text for name in dict.fromkeys(names) if (text := report_problem(name)) is not None]
    alone = [name for name in ("none", "all") if name in names]
    if alone and len(set(names)) > 1:
        found.append(f"{alone[0]!r} stands alone: leave it out, or the others")
    return found


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False


def environment_of(folder: Path, run_id: str) -> dict[str, str]:
    """Environment variables that keep the files of a run's integrations under `folder`, and let all of its attempts
    write on one curve."""
    return {
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_DIR": str(folder),
        "WANDB_PROJECT": PROJECT,
        "WANDB_RUN_ID": run_id,
        "WANDB_RESUME": "allow",
    }


def without_secrets(text: str, environment: Mapping[str, str], words: Iterable[str] = ()) -> str:
    """`text` with the values of variables that look like secrets blotted out."""
    marks = tuple(words) or ("KEY", "TOKEN", "SECRET", "PASSW")
    for name, value in environment.items():
        if len(value) >= 8 and any(mark in name.upper() for mark in marks):
            text = text.replace(value, "***")
    return text
