"""Notifications: automations that tell a person, and change nothing.

Each is named `slipstream <instance>: …`, so that applying them again changes those that are there. Prefect evaluates
them on its server, from events: states of flow runs with the instance's tag, and those of `flows.events`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from flows.events import RECOVERED, SWEEP_FINISHED, run_resource, sweep_resource
from flows.names import TAG, instance_tag

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events.schemas.automations import AutomationCore

OFTEN, OFTEN_WITHIN_S = 3, 3600.0
# A crashed run is started again within a minute or two, which is no news; one that is not, is.
LEFT_CRASHED_S = 600.0
PAGE = 200  # automations that are read at once
STATE = "prefect.flow-run."
EXAMPLES = "slack-webhook, custom-webhook, ms-teams-webhook, sendgrid-email"


class NotificationBlockError(Exception):
    """A block that notifications were to be sent with is not there, or cannot send any."""


@dataclass(frozen=True)
class Applied:
    """Names of the automations that were made, changed and left as they were."""

    created: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def name_prefix(instance: str) -> str:
    return f"{TAG} {instance}: "


def notification_automations(
    instance: str,
    block_document_id: UUID | str,
    block: str = "",
    *,
    often: int = OFTEN,
    left_crashed_s: float = LEFT_CRASHED_S,
) -> list["AutomationCore"]:
    """The automations of an instance that notify with one block.

    Args:
        block: told in the names, so that several blocks can be notified.
        often: recoveries of one run within an hour that are worth a message.
        left_crashed_s: seconds after which a crashed run that nobody has started again is worth one; at least 10.
    """
    from prefect.events.actions import SendNotification
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    ours = {
        "prefect.resource.role": "tag",
        "prefect.resource.id": f"prefect.tag.{instance_tag(instance)}",
    }
    flow_run = {"prefect.resource.id": f"{STATE}*"}

    def automation(what: str, description: str, trigger: dict[str, Any], subject: str, body: str) -> AutomationCore:
        return AutomationCore(
            name=f"{name_prefix(instance)}{what}" + (f" ({block})" if block else ""),
            description=description,
            trigger=EventTrigger(match_related=ours, for_each={"prefect.resource.id"}, **trigger),
            actions=[SendNotification(block_document_id=UUID(str(block_document_id)), subject=subject, body=body)],
        )

    link = "{{ flow_run|ui_url }}"
    run = "{{ flow_run.name }}"
    return [
        automation(
            "run failed",
            "A run has failed for good.",
            {"match": flow_run, "expect": {f"{STATE}Failed"}, "posture": Posture.Reactive, "threshold": 1},
            f"slipstream: {run} failed",
            f"{run} failed.\n{{{{ flow_run.state.message }}}}\n{link}",
        ),
        automation(
            "run crashed and was not started again",
            "A run's process died, and nobody has started it again.",
            {
                "match": flow_run,
                "after": {f"{STATE}Crashed"},
                "expect": {
                    f"{STATE}{name}" for name in ("Running", "Completed", "Failed", "Cancelled", "AwaitingRetry")
                },
                "posture": Posture.Proactive,
                "threshold": 1,
                "within": timedelta(seconds=left_crashed_s),
            },
            f"slipstream: {run} crashed",
            f"{run} crashed, and has not been started again: is `slipstream reconcile` running?\n{link}",
        ),
        automation(
            "recovered often",
            f"Jobs of a run were started again {often} times within an hour.",
            {
                "match": {"prefect.resource.id": run_resource("*")},
                "expect": {RECOVERED},
                "posture": Posture.Reactive,
                "threshold": often,
                "within": timedelta(seconds=OFTEN_WITHIN_S),
            },
            "slipstream: {{ event.resource.name }} recovers often",
            f"Jobs of {{{{ event.resource.name }}}} were started again {often} times within an hour. The last: "
            f"{{{{ event.payload.role }}}}, {{{{ event.payload.reason }}}}\n{link}",
        ),
        automation(
            "sweep finished",
            "A sweep has finished.",
            {
                "match": {"prefect.resource.id": sweep_resource("*")},
                "expect": {SWEEP_FINISHED},
                "posture": Posture.Reactive,
                "threshold": 1,
            },
            "slipstream: sweep {{ event.resource.name }} has finished",
            f"The sweep {{{{ event.resource.name }}}} has finished.\n{link}",
        ),
    ]


def apply_notifications(client: "SyncPrefectClient", instance: str, blocks: Sequence[str]) -> Applied:
    """Make the automations of an instance that notify with `blocks` ("slack-webhook/NAME"), or bring them up to date.

    One that a person has switched off stays off. Raises NotificationBlockError before anything is changed.
    """
    wanted = [
        automation
        for block in blocks
        for automation in notification_automations(instance, find_block(client, block), block)
    ]
    there = {one["name"]: one for one in our_automations(client, instance)}
    done: dict[str, list[str]] = {"created": [], "updated": [], "kept": []}
    for automation in wanted:
        old = there.get(automation.name)
        body = automation.model_dump(mode="json")
        if old is None:
            client.create_automation(automation)
            done["created"].append(automation.name)
        elif _same({**old, "enabled": True}, body):
            done["kept"].append(automation.name)
        else:
            automation.enabled = bool(old["enabled"])
            client.update_automation(UUID(old["id"]), automation)
            done["updated"].append(automation.name)
    return Applied(*(tuple(done[name]) for name in ("created", "updated", "kept")))


def our_automations(client: "SyncPrefectClient", instance: str) -> list[dict[str, Any]]:
    """The automations of an instance that are on the server, as it tells them."""
    found: list[dict[str, Any]] = []
    while True:
        body = {"limit": PAGE, "offset": len(found), "sort": "CREATED_DESC"}
        page = client.request("POST", "/automations/filter", json=body).json()
        found += page
        if len(page) < PAGE:
            return [one for one in found if one["name"].startswith(name_prefix(instance))]


def _same(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether the automation on the server is the one that is wanted; what only the server says of it does not count."""
    return all(_part(old.get(key), new[key]) for key in new)


def _part(old: Any, new: Any) -> bool:
    if isinstance(new, dict):
        return isinstance(old, dict) and all(_part(old.get(key), value) for key, value in new.items())
    if isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        if all(isinstance(one, str) for one in [*new, *old]):
            return sorted(new) == sorted(old)  # sets of event names
        return all(_part(one, other) for one, other in zip(old, new, strict=True))
    return bool(old == new)


def find_block(client: "SyncPrefectClient", text: str) -> UUID:
    """The id of the block document `SLUG/NAME`. Raises NotificationBlockError with the way out."""
    from prefect.exceptions import ObjectNotFound

    slug, _, name = text.partition("/")
    if not slug or not name:
        raise NotificationBlockError(
            f"the block {text!r} is none: write TYPE/NAME, like slack-webhook/team (types: {EXAMPLES})"
        )
    try:
        document = client.read_block_document_by_name(name, slug, include_secrets=False)
    except ObjectNotFound:
        known = _told(f"{one['block_type']['slug']}/{one['name']}" for one in _documents(client))
        raise NotificationBlockError(
            f"there is no block {text!r} on {client.api_url}: make it in the UI (Blocks, +) or with Prefect's `save`; "
            f"blocks there that can notify: {known}"
        ) from None
    capabilities = document.block_schema.capabilities if document.block_schema else []
    if "notify" not in capabilities:
        raise NotificationBlockError(f"the block {text!r} cannot notify anybody: take one of another type ({EXAMPLES})")
    return UUID(str(document.id))


def _documents(client: "SyncPrefectClient") -> list[dict[str, Any]]:
    body = {"block_schemas": {"block_capabilities": {"all_": ["notify"]}}, "limit": PAGE}
    return list(client.request("POST", "/block_documents/filter", json=body).json())


def _told(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
