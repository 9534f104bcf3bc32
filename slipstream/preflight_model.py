"""Is the model there, complete, and does it fit? Reads the small files of a model folder only; no torch."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config_file import Problem
from slipstream.run_config import RunConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SMALL_FILES = ("config.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json", "tokenizer.json")
HUB_TIMEOUT_S = 10.0
PACKED = frozenset({"llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"})  # no need to look
ALONG_THE_PATH = frozenset({"full_attention", "sliding_attention"})
LOOK_TIMEOUT_S = 120.0
REFUSED = 3
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files lie. `complete`: all of them are here; otherwise the weights are still on the hub."""

    folder: Path
    complete: bool

    def file(self, name: str) -> Path | None:
        path = self.folder / name
        return path if path.is_file() else None

    def read(self, name: str) -> dict[str, Any]:
        """A JSON object, empty where the file is missing or holds something else."""
        path = self.file(name)
        try:
            value = json.loads(path.read_text(encoding="utf-8")) if path else {}
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


def find_model(name: str, revision: str | None) -> tuple[ModelFiles | None, list[Problem]]:
    """The files of a local folder or of a hub model (its small files are fetched into the cache)."""
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelFiles(path, complete=True), []
    if path.exists():
        return None, [Problem("model.name", name, "is a file: name the folder that save_pretrained wrote")]
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return None, [Problem("model.name", name, f"there is no folder {path.absolute()}")]
    return _on_hub(name, revision)


def _on_hub(name: str, revision: str | None) -> tuple[ModelFiles | None, list[Problem]]:
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    def refused(message: str) -> tuple[None, list[Problem]]:
        return None, [Problem("model.name", name, message)]

    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return refused("is neither a folder here nor a hub id like Qwen/Qwen3-0.6B")
    if isinstance(cached, str):
        files = ModelFiles(Path(cached).parent, complete=False)
        if _weights_missing(files) is None:
            return ModelFiles(files.folder, complete=True), []
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        state = "its weights are not" if isinstance(cached, str) else "it is not"
        return refused(
            f"is no folder here, {state} in the local cache, and HF_HUB_OFFLINE forbids to fetch: "
            f"unset HF_HUB_OFFLINE, or run `hf download {name}` where there is a network"
        )
    try:
        listed = {
            sibling.rfilename
            for sibling in HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S).siblings or []
        }
        folder = None
        for file in [file for file in SMALL_FILES if file in listed]:
            folder = Path(hf_hub_download(name, file, revision=revision, etag_timeout=HUB_TIMEOUT_S)).parent
    except HfHubHTTPError as error:
        return refused(f"is no folder here, and the hub refuses it: {_first_line(error)}")
    except Exception as error:  # the hub library changes its HTTP client between versions, and so the class
        return refused(f"is no folder here, and the hub cannot be reached: {_first_line(error)}")
    if folder is None:
        return refused("has no config.json on the hub: it is no transformers model")
    if not any(file.endswith((".safetensors", ".bin")) for file in listed):
        return refused("has no weights on the hub (model.safetensors)")
    return ModelFiles(folder, complete=False), []


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wanted = [line for line in lines if "Request ID" not in line]
    return (wanted or lines or [type(error).__name__])[0]


def model_problems(model: ModelFiles, config: RunConfig) -> list[Problem]:
    """What is missing in a model's folder, and whether the server's sequence length fits it."""
    name = config.model.name

    def problem(message: str) -> Problem:
        return Problem("model.name", name, message)

    if model.file("config.json") is None:
        if model.file("adapter_config.json"):
            base = model.read("adapter_config.json").get("base_model_name_or_path", "the base model")
            return [
                problem(f"the folder holds an adapter, not a model: name {base}, or merge the adapter into it and save")
            ]
        return [problem("the folder has no config.json: it must be one that save_pretrained wrote")]
    settings = model.read("config.json")
    if not settings:
        return [problem("its config.json is no JSON object")]
    problems = []
    missing = _weights_missing(model) if model.complete else None
    if missing:
        problems.append(problem(missing))
    if not any(model.file(file) for file in TOKENIZER_FILES):
        if model.complete or model.file("tokenizer_config.json") is None:
            message = (
                f"has no tokenizer ({', '.join(TOKENIZER_FILES[:3])}…): save it there with tokenizer.save_pretrained"
            )
            problems.append(problem(message))
    elif not has_chat_template(model):
        problems.append(
            problem(
                "its tokenizer has no chat template, so conversations cannot be rendered: use the instruct version of "
                "the model, or set tokenizer.chat_template and save the tokenizer (it writes chat_template.jinja)"
            )
        )
    return [*problems, *_packing_problems(model, settings, config), *_length_problems(settings, config)]


def _packing_problems(model: ModelFiles, settings: dict[str, Any], config: RunConfig) -> list[Problem]:
    """Whether packed rows of such a model would be trained right: asked of a process that loads torch."""
    kinds = settings.get("layer_types") or ()
    if settings.get("model_type") in PACKED and ALONG_THE_PATH.issuperset(kinds):
        return []
    if "model_type" not in settings or settings.get("auto_map"):  # its own code: known once it is loaded
        return []
    command = [sys.executable, "-m", "slipstream.packing.attention.support", str(model.folder)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return []  # the learner asks again
    words = answer.stdout.strip()
    return [Problem("model.name", config.model.name, words)] if answer.returncode == REFUSED and words else []


def has_chat_template(model: ModelFiles) -> bool:
    if model.file("chat_template.jinja") or model.file("chat_template.json"):
        return True
    return bool(model.read("tokenizer_config.json").get("chat_template"))


def _weights_missing(model: ModelFiles) -> str | None:
    """What is missing of the weights or wrong with them, or None."""
    for index in WEIGHT_INDEXES:
        shards = set(model.read(index).get("weight_map", {}).values())
        absent = sorted(shard for shard in shards if model.file(shard) is None)
        if shards:
            return (
                f"{len(absent)} of {len(shards)} weight files are missing, like {absent[0]}"
                if absent
                else _pointer(model, shards)
            )
    files = [path.name for pattern in ("*.safetensors", "pytorch_model*.bin") for path in model.folder.glob(pattern)]
    files = [file for file in files if not file.startswith(("adapter_", "training_"))]
    return _pointer(model, set(files)) if files else "the folder has no weights (model.safetensors)"


def _pointer(model: ModelFiles, files: set[str]) -> str | None:
    for file in sorted(files):
        with open(model.folder / file, "rb") as stream:
            start = stream.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            return f"{file} is a pointer of git-lfs, not weights: run `git lfs pull` in the folder"
        if not start:
            return f"{file} is empty"
        if file.endswith(".safetensors") and not _whole(model.folder / file):
            return f"{file} is damaged or cut short: copy or download it again"
    return None


def _whole(path: Path) -> bool:
    """Whether a safetensors file has the length that its header asks for."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= size - 8:
                return False
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return False
    return size == 8 + length + max(ends, default=0)


def _length_problems(settings: dict[str, Any], config: RunConfig) -> list[Problem]:
    text = settings.get("text_config") if isinstance(settings.get("text_config"), dict) else settings
    assert isinstance(text, dict)
    longest = next(
        (text[key] for key in ("max_position_embeddings", "n_positions", "max_seq_len") if text.get(key)), None
    )
    wanted = config.server.max_model_len
    if not isinstance(longest, int) or wanted <= longest:
        return []
    return [
        Problem("server.max_model_len", wanted, f"the model has positions for {longest} tokens only: set at most that")
    ]
