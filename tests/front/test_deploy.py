"""`slipstream deploy` on a real server: what it makes, what it leaves alone, what it removes; forms that are refused."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.exceptions import ObjectAlreadyExists

from cluster.profile import load_profile
from flows.deploy.apply import Done, _look_again
from flows.deploy.forms import fields
from tests.front_door import INSTANCE, PATIENCE_S, Front
from tests.prefect_server import ROOT

pytestmark = pytest.mark.integration

QUICK = f"train/{INSTANCE}.quick"


def deploy(front: Front, *words: str) -> dict[str, str]:
    """What became of each thing, by its name."""
    done = front.command("deploy", "--preset", str(front.preset), *words)
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()[1:]]
    return {name: what for _, name, what in lines}


def script(front: Front, text: str) -> Any:
    """What Python that has found the server prints as JSON."""
    code = f"import json\nfrom flows.connection import connect\nconnect()\n{text}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=front.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_second_time_changes_nothing(front: Front) -> None:
    deploy(front)
    again = deploy(front)
    assert QUICK in again
    assert f"slipstream-{INSTANCE}-care" in again
    assert set(again.values()) == {"unchanged"}


def test_its_deployments_hold_the_whole_preset_and_enforce_their_form(front: Front) -> None:
    found = front.find_deployment()
    assert found["enforce_parameter_schema"] is True
    assert found["entrypoint"] == "flows/train.py:train"
    assert found["tags"] == ["slipstream", f"slipstream:{INSTANCE}"]
    assert found["parameters"]["config"]["trainer"]["save_steps"] == 4
    assert found["parameters"]["config"]["recovery"]["heartbeat_timeout"] == 180.0
    template = front.ask("GET", f"work_pools/slipstream-{INSTANCE}")["base_job_template"]
    defaults = {key: value.get("default") for key, value in template["variables"]["properties"].items()}
    assert defaults["stream_output"] is False
    assert defaults["command"].endswith("-m flows.up.engine")


def test_what_people_have_set_stays(front: Front) -> None:
    """A pause, schedules that they made, a limit; what is ours is brought up to date beside it."""
    deployment = front.find_deployment()
    route = f"deployments/{deployment['id']}"
    schedule = {"schedule": {"cron": "0 3 * * *", "timezone": "Europe/Berlin"}, "active": False}
    front.ask("POST", f"{route}/schedules", [schedule])
    front.ask("PATCH", route, {"paused": True, "description": "changed", "concurrency_limit": 2})
    try:
        assert deploy(front)[QUICK] == "updated (description)"
        found = front.find_deployment()
        assert found["id"] == deployment["id"]
        assert found["paused"] is True
        assert found["description"] == deployment["description"]
        assert found["global_concurrency_limit"]["limit"] == 2
        (kept,) = found["schedules"]
        assert kept["active"] is False
        assert kept["schedule"]["timezone"] == "Europe/Berlin"
    finally:
        front.ask("PATCH", route, {"paused": False, "concurrency_limit": None})
        for kept in front.find_deployment()["schedules"]:
            front.ask("DELETE", f"{route}/schedules/{kept['id']}")


def test_how_many_trainings_at_once(front: Front) -> None:
    pool = f"work_pools/slipstream-{INSTANCE}"
    assert front.ask("GET", pool)["concurrency_limit"] is None
    try:
        assert deploy(front, "--at-once", "3")[f"slipstream-{INSTANCE}"] == "updated (concurrency_limit)"
        assert deploy(front)[f"slipstream-{INSTANCE}"] == "unchanged"
        assert front.ask("GET", pool)["concurrency_limit"] == 3
        assert front.ask("GET", f"{pool}-care")["concurrency_limit"] is None
    finally:
        front.ask("PATCH", pool, {"concurrency_limit": None})


def test_looking_after_runs_waits_for_no_run(front: Front) -> None:
    """A pass that had to wait for a free place among the trainings would come when the last of them has ended."""
    pool = f"work_pools/slipstream-{INSTANCE}"
    front.ask("PATCH", pool, {"concurrency_limit": 1})
    front.hold("busy")
    try:
        first = front.submit()
        front.wait_state(first, "RUNNING")
        second = front.submit()
        front.wait_passes(1)
        assert front.state(first) == "RUNNING"
        assert front.state(second) == "SCHEDULED"
    finally:
        front.ask("PATCH", pool, {"concurrency_limit": None})
        front.release("busy")
    for flow_run in (first, second):
        assert front.wait_state(flow_run)["state_type"] == "COMPLETED"


def test_who_is_to_be_told(front: Front) -> None:
    """A block that is there gives automations, once; one that is not is refused, with those that are."""
    words = ("deploy", "--preset", str(front.preset), "--notify")
    kind = front.ask("GET", "block_types/slug/slack-webhook")["id"]
    wanted = {"block_schemas": {"block_type_id": {"any_": [kind]}}}
    schema = front.ask("POST", "block_schemas/filter", wanted)[0]["id"]
    block = {"name": "team", "block_type_id": kind, "block_schema_id": schema}
    front.ask("POST", "block_documents/", {**block, "data": {"url": "https://hooks.slack.com/services/none"}})

    def automations() -> list[str]:
        return sorted(one["name"] for one in front.ask("POST", "automations/filter", {}))

    refused = front.command(*words, "slack-webhook/taem")
    assert refused.returncode != 0
    assert "slack-webhook/taem" in refused.stderr
    assert "slack-webhook/team" in refused.stderr
    assert automations() == []
    made = front.command(*words, "slack-webhook/team")
    assert made.returncode == 0, made.stderr
    assert len(there := automations()) >= 3
    assert all(name.startswith(f"slipstream {INSTANCE}: ") for name in there)
    again = front.command(*words, "slack-webhook/team")
    assert automations() == there
    assert again.stdout.count("unchanged") >= len(there)


def test_prune_shows_and_then_removes_only_its_own(front: Front) -> None:
    flow = front.ask("POST", "flows/", {"name": "train"})["id"]
    ours, theirs = ["slipstream", f"slipstream:{INSTANCE}"], ["slipstream", "slipstream:bob"]
    made = {f"{INSTANCE}.gone": ours, f"{INSTANCE}.quick@nightly": ours, "bob.gone": theirs, f"{INSTANCE}.mine": []}
    for name, tags in made.items():
        front.ask("POST", "deployments/", {"name": name, "flow_id": flow, "tags": tags})
    words = ("deploy", "--preset", str(front.preset), "--prune")
    shown = front.command(*words).stdout
    assert [line.strip() for line in shown.splitlines()[2:]] == [f"train/{INSTANCE}.gone"]
    assert front.find_deployment(f"train/{INSTANCE}.gone")
    removed = front.command(*words, "--yes").stdout
    assert removed.splitlines()[1].split() == ["removed", f"train/{INSTANCE}.gone"]
    assert "nothing to remove" in front.command(*words).stdout
    for name in made:
        if name != f"{INSTANCE}.gone":
            assert front.find_deployment(f"train/{name}"), name
    assert front.find_deployment()


BLOCK = f"{INSTANCE}-slurm"
BLOCKS = """
import asyncio
from flows.deploy.apply import apply
from flows.deploy.deployments import ProfileBlock as Wanted1, Wanted
from flows.deploy.presets import load_presets
from flows.deploy.profile_blocks import ProfileBlock, with_profile_file

def made(**values):
    block = Wanted1("tester-changing", "slurm.toml", {"executor": "slurm", **values})
    return asyncio.run(apply(Wanted("tester", [], [], [block])))[0].what

said = [made(), made(), made(partition="gpu", setup=["module load cuda"])]
block = ProfileBlock.load("tester-changing")
said.append(block.partition)
block.account = "mine"  # as a person does in the page
block.save("tester-changing", overwrite=True)
said.append(made(partition="cpu"))
config = load_presets()["demo"]
config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"profile": "block:tester-changing"})})
said.append(with_profile_file(config).cluster.profile)
config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"profile": "block:nowhere"})})
try:
    with_profile_file(config)
except Exception as error:
    said.append(f"{type(error).__name__}: {error}")
print(json.dumps(said))
"""


def test_a_profile_s_block_follows_its_file_until_somebody_edits_it(front: Front) -> None:
    *said, path, refused = script(front, BLOCKS)
    assert said == ["made", "unchanged", "updated", "gpu", "kept (it was edited)"]
    assert path == str(front.home / "profiles" / "tester-changing.toml")
    profile = load_profile(path)
    assert (profile.executor, profile.partition, profile.account) == ("slurm", "gpu", "mine")
    assert profile.setup == ("module load cuda",)
    assert refused.startswith("ConfigError")
    assert 'cluster.profile = "block:nowhere": there is no such block' in refused


TITLES = {
    "train": {"config": "Run", "run_id": "Run id"},
    "sweep": {"settings": "Sweep"},
    "reconcile": {"roots": "Storage roots", "dry_run": "Dry run"},
}


def test_no_form_on_the_server_takes_raw_json(front: Front) -> None:
    """Of every flow that there is; the flows' own parameters have the titles that the code gives them."""
    deployments = front.ask("POST", "deployments/filter", {})
    ours = [found for found in deployments if f"slipstream:{INSTANCE}" in found["tags"] and found["entrypoint"]]
    assert {found["name"] for found in ours} >= {f"{INSTANCE}.demo", f"{INSTANCE}.custom"}
    for deployment in ours:
        flow = deployment["entrypoint"].rpartition(":")[2]
        form = deployment["parameter_openapi_schema"]
        assert {name: field["title"] for name, field in form["properties"].items()} == TITLES[flow]
        for name, field in fields(form):
            assert field.get("title"), (deployment["name"], name)
            assert field.get("description"), (deployment["name"], name)
            for part in field.get("anyOf", [field]):
                assert part.get("type") != "object" or part.get("properties"), (deployment["name"], name)


def test_a_block_has_a_form_without_raw_json(front: Front) -> None:
    document = front.ask("GET", f"block_types/slug/slipstream-cluster-profile/block_documents/name/{BLOCK}")
    assert document["data"]["executor"] == "slurm"
    fields = document["block_schema"]["fields"]["properties"]
    assert len(fields) > 20
    for name, field in fields.items():
        assert field["title"], name
        assert field["description"], name
        kinds = {part.get("type") for part in field.get("anyOf", [field])}
        assert kinds <= {"string", "number", "integer", "boolean", "array", "null"}, (name, kinds)


def submitted(front: Front, config: dict[str, Any]) -> httpx.Response:
    deployment = front.find_deployment()
    body = {"parameters": {"config": config}, "state": {"type": "SCHEDULED"}}
    url = f"{front.api}/deployments/{deployment['id']}/create_flow_run"
    return httpx.post(url, json=body, auth=front.auth, trust_env=False, timeout=60)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer": {"max_steps": -5}}, "-5 is less than the minimum of -1"),
        ({"trainer": {"max_stepz": 5}}, "max_stepz"),
        ({"cluster": {"shape": "round"}}, "round"),
        ({"model": {"name": ""}}, "name"),
    ],
)
def test_a_bad_value_is_refused_at_submit(front: Front, changes: dict[str, Any], words: str) -> None:
    answer = submitted(front, front.quick_config(**changes))
    assert answer.status_code == 409, answer.text
    assert words in answer.text


def test_what_only_the_flow_can_refuse_fails_at_once_and_says_why(front: Front) -> None:
    config = front.quick_config(trainer={"max_completion_length": 9000, "warmup_steps": 3})
    before = len(front.runs())
    found = front.wait_state(front.submit(config=config))
    assert found["state_type"] == "FAILED"
    log = front.log_of(found["id"]).read_text()
    assert "refused: " in log
    assert "Logging error" not in log
    message = found["state"]["message"]
    assert "the form: 2 problems" in message
    assert "trainer.max_completion_length = 9000: leaves no prompt room" in message
    (artifact,) = front.ask(
        "POST",
        "artifacts/filter",
        {"artifacts": {"flow_run_id": {"any_": [found["id"]]}, "key": {"any_": ["refused"]}}},
    )
    listed = sorted(line.partition("`: ")[0] for line in artifact["data"].splitlines() if line.startswith("- "))
    assert listed == ["- `trainer.max_completion_length = 9000", "- `trainer.warmup_steps = 3"]
    assert len(front.runs()) == before


def test_a_preset_s_relative_paths_start_where_the_command_was_given(front: Front, tmp_path: Path) -> None:
    text = front.preset.read_text().replace(f'"{front.root}/prompts.jsonl"', '"mine.jsonl"')
    (tmp_path / "elsewhere.toml").write_text(text)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    done = front.command("deploy", "--preset", str(tmp_path / "elsewhere.toml"), "--directory", str(tmp_path))
    assert done.returncode == 0, done.stderr
    front.plan()
    found = front.wait_state(front.submit(f"train/{INSTANCE}.elsewhere"))
    assert found["state_type"] == "COMPLETED", found["state"]


def test_what_another_deploy_has_made_meanwhile_is_looked_at_again() -> None:
    found = [ObjectAlreadyExists(http_exc=Exception()), Done("pool", "p", "unchanged")]

    async def step() -> Done:
        answer = found.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert asyncio.run(_look_again(step)).what == "unchanged"


def test_a_pool_of_another_kind_is_left_alone(front: Front) -> None:
    front.ask("POST", "work_pools/", {"name": "slipstream-taken", "type": "docker"})
    try:
        done = front.command("deploy", "--instance", "taken")
        assert done.returncode == 2, done.stdout
        assert "slipstream-taken' is there, of the type 'docker'" in done.stderr
    finally:
        front.ask("DELETE", "work_pools/slipstream-taken")


def test_a_server_that_asks_nobody_is_refused_unless_told(front: Front) -> None:
    """A stand-in for another machine's server: ours, which is told to count as one of another machine."""
    code = """
import sys
import flows.connection as connection
connection.is_loopback = lambda url: False
connection.asks_nobody = lambda url: True
from flows.cli.main import main
main(["deploy"] + sys.argv[1:])
"""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", code, *words]
        return subprocess.run(
            argv, cwd=ROOT, env=front.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    refused = run()
    assert refused.returncode != 0
    assert "--allow-unauthenticated" in refused.stderr
    assert run("--allow-unauthenticated").returncode == 0


def test_whether_a_server_asks_for_a_password(front: Front) -> None:
    text = "from flows.connection import asks_nobody\nimport os\nprint(json.dumps(asks_nobody(os.environ['PREFECT_API_URL'])))"
    assert script(front, text) is False


def test_no_server_is_told_with_the_way_out(front: Front, tmp_path: Path) -> None:
    done = front.command("deploy", SLIPSTREAM_HOME=str(tmp_path / "none"))
    assert done.returncode == 1
    assert "slipstream up" in done.stderr
