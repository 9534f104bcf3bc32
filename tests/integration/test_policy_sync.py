"""`PolicySync` against the real server: full weights, and LoRA adapters merged on the way."""

from collections.abc import Iterator

import pytest
import torch
from peft import LoraConfig, get_peft_model

from slipstream.learner.sync import PolicySync
from slipstream.serving.transport import SlipstreamTransport
from tests.models import new_model
from tests.serving_process import VllmServer, largest_difference

pytestmark = pytest.mark.integration
PROMPT = list(range(10, 60))


@pytest.fixture
def sync(vllm_server: VllmServer) -> Iterator[PolicySync]:
    with vllm_server.control() as control:
        transport = SlipstreamTransport(control, torch.device("cpu"), "policy", 1, 60.0)
        policy = PolicySync(transport, "policy", 1, torch.float32, 3)
        policy.connect()
        yield policy
        policy.close()


def test_versions_count_up_and_label_what_the_server_generates(vllm_server: VllmServer, sync: PolicySync) -> None:
    model = new_model(tied=True, seed=7)
    sync.deliver(model)
    assert vllm_server.generate(PROMPT)["weight_versions"][0]["version"] == "policy/a1/3"
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.1)
    sync.advance(model)
    choice = vllm_server.generate(PROMPT)
    assert choice["weight_versions"][0]["version"] == "policy/a1/4"
    assert largest_difference(choice, model, PROMPT) < 1e-4


def test_an_adapter_arrives_merged_and_the_model_is_left_alone(vllm_server: VllmServer, sync: PolicySync) -> None:
    base = new_model(tied=True, seed=8)
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    sync.deliver(adapted)
    choice = vllm_server.generate(PROMPT)
    assert largest_difference(choice, adapted.eval(), PROMPT) < 1e-4
    with adapted.disable_adapter():
        assert largest_difference(choice, adapted, PROMPT) > 0.1, "the adapter matters"
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())
