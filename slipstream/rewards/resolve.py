"""From `module:function` to a reward function that will work in the rollout process, or the reason why it will not."""

import difflib
import importlib
import inspect
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ARGUMENTS = ("prompts", "completions", "completion_ids")


class RewardError(ValueError):
    """A reward function cannot be used; the message says why and what to do."""


def resolve_reward(name: str, paths: Sequence[str] = (), columns: Sequence[str] | None = None) -> Callable[..., Any]:
    """The reward function `module:function`, checked.

    Args:
        name: the function, or another importable callable (a partial, an instance), by module and attribute.
        paths: folders put in front of the import path, and left there: a spawned process needs them too.
        columns: of the dataset; with them, the signature is checked against what the function will be called with.

    Raises RewardError where it does not import, is not callable, does not pickle or does not take the arguments.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise RewardError("must be written module:function, like slipstream.rewards:accuracy_reward")
    for path in reversed([str(Path(path).expanduser().absolute()) for path in paths]):
        if not Path(path).is_dir():
            raise RewardError(f"the import path {path} is no folder (reward.paths)")
        if path not in sys.path:
            sys.path.insert(0, path)
    function = _attribute(_module(module_name, paths), attribute)
    if inspect.isclass(function):
        raise RewardError(
            f"{attribute} is a class: name an instance of it, made in the module, like `score = {attribute}()`"
        )
    if not callable(function):
        raise RewardError(f"{attribute} is not a function but {type(function).__name__}: name one that can be called")
    _check_pickles(function, attribute)
    problems = signature_problems(function, columns)
    if problems:
        raise RewardError("; ".join(problems))
    return function


def _module(name: str, paths: Sequence[str]) -> Any:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a script without a main guard may exit
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and (name == error.name or name.startswith(f"{error.name}."))
        ):
            looked = ", ".join(paths) if paths else "none are set"
            raise RewardError(
                f"there is no module {error.name!r}: install it, or put its folder into reward.paths ({looked})"
            ) from error
        raise RewardError(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _attribute(module: Any, attribute: str) -> Any:
    value = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, [n for n in dir(value) if not n.startswith("_")], n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RewardError(f"{module.__name__} has no {part!r}{hint}")
        value = getattr(value, part)
    return value


def _check_pickles(function: Any, attribute: str) -> None:
    try:
        pickle.loads(pickle.dumps(function))
    except Exception as error:
        mend = (
            "write a function at the top of a module (`def …`), or use functools.partial of one, or an instance of a "
            "class with __call__; no lambda and no function inside a function"
        )
        raise RewardError(
            f"{attribute} does not pickle, and rewards run in another process: {mend} ({error})"
        ) from error


def signature_problems(function: Callable[..., Any], columns: Sequence[str] | None = None) -> list[str]:
    """What stands against calling `function` with keyword arguments prompts, completions, completion_ids and `columns`.

    With `columns` None only what holds for any dataset is said.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []  # written in C: only the call will tell
    given = [*ARGUMENTS, *(name for name in columns or () if name != "prompt")]
    problems = []
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional:
        problems.append(f"it takes {', '.join(positional)} by position only, but is called with keyword arguments")
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unnamed = [name for name in given if name not in named]
    if unnamed and not takes_any:
        problems.append(
            f"it does not take the argument{'s' * (len(unnamed) > 1)} {', '.join(unnamed)}: add **kwargs to it"
        )
    if columns is not None:
        has = f"(columns: {', '.join(columns)})"
        missing = [name for name in named if parameters[name].default is inspect.Parameter.empty and name not in given]
        if missing:
            what = f"the column{'s' * (len(missing) > 1)} {', '.join(sorted(missing))}"
            problems.append(f"it needs {what}, which the dataset does not have {has}")
        choices = getattr(function, "needs_one_of", ())
        if choices and not set(choices) & set(columns):
            problems.append(f"it needs one of the columns {', '.join(choices)}, and the dataset has none of them {has}")
    return problems
