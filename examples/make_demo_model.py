"""Make the demo: a tiny Qwen3 that half knows two-digit addition, and the pairs to train and test it on.

    python examples/make_demo_model.py [--output examples] [--seed 0]

writes `demo_model/` (float32 weights, character tokenizer with a chat template, generation config) and
`demo_data/train.jsonl` and `demo_data/heldout.jsonl` (conversational prompts with their `answer`) under the output
folder. The same seed on the same versions of torch and transformers gives the same files. It takes one CPU thread and a
few minutes.

Reinforcement learning needs a start that is right sometimes. So the model first learns addition from correct answers
and then from answers of which most are a little wrong, until a sampled answer (temperature 1) is right about three
times in ten. Pairs of the held-out set are in neither stage.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
VOCABULARY = [PAD, BOS, EOS, UNK, *"0123456789+="]
TOKEN_ID = {token: index for index, token in enumerate(VOCABULARY)}
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"

HELD_OUT_PAIRS = 400
ANSWER_LENGTH = 4  # at most three digits and the end of the sequence
BATCH_SIZE = 256
CLEAN_LEARNING_RATE, NOISY_LEARNING_RATE = 2e-3, 2e-4
CLEAN_REWARD, START_REWARD = 0.95, 0.31  # where the two stages end
WRONG_SHARE = 0.7  # of the answers in the second stage
WRONG_BY = (-3, -2, -1, 1, 2, 3)
MEASURE_EVERY = 5
MOST_STEPS = 6000

Pair = tuple[int, int]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; the template is the beginning-of-sequence token and then the user's text."""
    tokenizer = Tokenizer(models.WordLevel(TOKEN_ID, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK, padding_side="left"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(seed: int) -> Qwen3ForCausalLM:
    """Freshly initialised, 0.33 million parameters, tied embeddings."""
    torch.manual_seed(seed)
    special = {"pad_token_id": TOKEN_ID[PAD], "bos_token_id": TOKEN_ID[BOS], "eos_token_id": TOKEN_ID[EOS]}
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        dtype="float32",
        **special,
    )
    model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(**special)
    return model


def question(pair: Pair) -> str:
    return f"{pair[0]}+{pair[1]}="


def split_pairs(seed: int) -> tuple[list[Pair], list[Pair]]:
    """All pairs of two-digit numbers in a random order: (training, held-out), disjoint."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    return pairs[HELD_OUT_PAIRS:], pairs[:HELD_OUT_PAIRS]


def encode(pairs: Sequence[Pair], answers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (n, t), int64, right-padded, and the labels (n, t): -100 but on the answer and its end."""
    ids, labels = [], []
    for pair, answer in zip(pairs, answers, strict=True):
        prompt = [TOKEN_ID[BOS], *(TOKEN_ID[c] for c in question(pair))]
        completion = [*(TOKEN_ID[c] for c in str(answer)), TOKEN_ID[EOS]]
        padding = ANSWER_LENGTH - len(completion)
        ids.append(prompt + completion + [TOKEN_ID[PAD]] * padding)
        labels.append([-100] * len(prompt) + completion + [-100] * padding)
    return torch.tensor(ids), torch.tensor(labels)


@torch.no_grad()
def expected_reward(model: Qwen3ForCausalLM, pairs: Sequence[Pair]) -> float:
    """Mean probability that an answer sampled at temperature 1 is right: the exact mean of the exact-match reward."""
    ids, labels = encode(pairs, [a + b for a, b in pairs])
    log_probs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    targets = labels[:, 1:]
    chosen = log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return chosen.where(targets != -100, 0.0).sum(-1).exp().mean().item()


def warm_start(model: Qwen3ForCausalLM, pairs: Sequence[Pair], seed: int) -> None:
    """The two supervised stages, in place. Raises RuntimeError where a stage does not end within `MOST_STEPS`."""
    rng = random.Random(seed)
    measured = rng.sample(pairs, 1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=CLEAN_LEARNING_RATE, weight_decay=0.0)
    noisy = False
    for step in range(1, MOST_STEPS + 1):
        batch = rng.choices(pairs, k=BATCH_SIZE)
        answers = [a + b + (rng.choice(WRONG_BY) if noisy and rng.random() < WRONG_SHARE else 0) for a, b in batch]
        rate = NOISY_LEARNING_RATE if noisy else CLEAN_LEARNING_RATE * min(1.0, step / 50)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, labels = encode(batch, answers)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % MEASURE_EVERY:
            continue
        reward = expected_reward(model, measured)
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}, reward {reward:.3f}", flush=True)
        if noisy and reward <= START_REWARD:
            print(f"step {step}: reward {reward:.3f}, done", flush=True)
            return
        if not noisy and reward >= CLEAN_REWARD:
            noisy = True
            print(f"step {step}: reward {reward:.3f}, now with wrong answers", flush=True)
    raise RuntimeError(
        f"the warm start did not end within MOST_STEPS = {MOST_STEPS} steps: raise it or the learning rates"
    )


def write_pairs(path: Path, pairs: Sequence[Pair]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"prompt": [{"role": "user", "content": question(p)}], "answer": str(sum(p))} for p in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent, help="folder that gets demo_model, demo_data"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, the weights and the warm start")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    training, held_out = split_pairs(arguments.seed)
    model = make_model(arguments.seed)
    warm_start(model, training, arguments.seed)
    print(f"held-out reward at temperature 1: {expected_reward(model, held_out):.3f}")

    model.save_pretrained(arguments.output / "demo_model")
    make_tokenizer().save_pretrained(arguments.output / "demo_model")
    write_pairs(arguments.output / "demo_data" / "train.jsonl", training)
    write_pairs(arguments.output / "demo_data" / "heldout.jsonl", held_out)


if __name__ == "__main__":
    main()
