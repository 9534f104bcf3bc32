"""Text of others on a page: nothing in it is markup. And no secret is on it."""

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flows.masking import MASK, Mask, mask_of
from flows.page.text import LINE, block, code, cut, table, visible
from slipstream.run_folder import RunFolder, write_json

EVIL = "</code></pre><img src=x onerror=alert(1)> ![i](http://evil/i.png) [l](http://evil) <script>x</script>"


@given(st.text())
@example("```\n# out\n![i](http://evil)\n```")
@example("`` ` ``")
@example("a\u202eb\u2028c\ud800")
def test_a_block_ends_only_with_its_own_fence(text: str) -> None:
    lines = block(text, 10_000).split("\n")
    fence = re.match("`+", lines[0])
    assert fence is not None
    assert lines[-1] == fence[0]
    assert not [line for line in lines[1:-1] if fence[0] in line]
    assert "\n".join(lines).encode("utf-8")


@given(st.text())
@example("`")
@example("a | b\n| c `` ")
def test_a_span_is_one_line_between_fences_that_are_not_in_it(text: str) -> None:
    span = code(text, 10_000)
    assert span == "–" or re.fullmatch(r"(`+)(?!`)[^\n|]*[^`\n|](\1)", span) or re.fullmatch(r"(`+) [^\n|]* (\1)", span)
    fence = re.match("`*", span)
    assert fence is not None
    assert span == "–" or fence[0] not in span[len(fence[0]) : -len(fence[0])]


def test_markup_stays_words() -> None:
    assert code(EVIL) == f"`{EVIL}`"
    assert block(EVIL).removeprefix("```text\n").removesuffix("\n```").replace("\n", "") == EVIL
    assert code("a``b`") == "``` a``b` ```"
    assert block("x\n````\ny").startswith("`````text\n")


def test_long_lines_are_folded_between_words() -> None:
    assert block("word " * 20).split("\n")[1:-1] == ["word " * 15, "word " * 5]
    assert block("x" * (LINE + 1)).split("\n")[1:-1] == ["x" * LINE, "x"]


def test_what_cannot_be_seen_is_written_out() -> None:
    assert visible("a\x1b[31mb\x00\u202e\u2028é\tz\r\n✓👩‍💻") == "a\\x1b[31mb\\x00\\u202e\\u2028é z\n✓👩‍💻"


def test_long_texts_keep_both_ends() -> None:
    assert cut("x" * 10, 10) == "x" * 10
    assert cut("a" * 50 + "b" * 50, 10) == "aaaaa … (90 characters) … bbbbb"
    assert len(code("x" * 10_000)) < 600


def test_an_empty_text_says_so() -> None:
    assert code(" \n ") == "–"
    assert block("") == "```text\n(empty)\n```"


def test_table() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "r")


def test_the_values_of_secrets_are_masked(run: RunFolder) -> None:
    write_json(run.path / "secrets" / "environment.json", {"WANDB_API_KEY": "wandb-value-1", "LANG": "en_US.UTF-8"})
    token = run.token_file.read_text().strip()
    environment = {
        "HF_TOKEN": "my-hf-value",
        "PREFECT_API_AUTH_STRING": "someone:long-password",
        "MY_SECRET": "short",
        "PATH": "/usr/local/bin",
        "TOKENIZERS_PARALLELISM": "false-false",
    }
    mask = mask_of(run, environment)
    text = f"{token} wandb-value-1 en_US.UTF-8 my-hf-value someone:long-password long-password short /usr/local/bin"
    assert mask(text) == f"{MASK} {MASK} en_US.UTF-8 {MASK} {MASK} {MASK} short /usr/local/bin"
    assert mask("false-false") == "false-false"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("hf_abcdefghijklmnopqrst", MASK),
        ("Authorization: Bearer abc.def-ghi_jkl", f"Authorization: Bearer {MASK}"),
        ("Authorization: Basic dXNlcjpwYXNz", f"Authorization: Basic {MASK}"),
        ("https://user:pass@host/x", f"https://{MASK}@host/x"),
        ("export HF_TOKEN=something", f"export HF_TOKEN={MASK}"),
        ("'WANDB_API_KEY': 'something'", f"'WANDB_API_KEY': '{MASK}'"),
        ("MAX_TOKENS=1234567 token_budget = 16384 TOKEN: 123456", "MAX_TOKENS=1234567 token_budget = 16384 TOKEN: 123456"),
        ("the basic idea of tokens: nothing secret", "the basic idea of tokens: nothing secret"),
        ("see http://127.0.0.1:8000/health", "see http://127.0.0.1:8000/health"),
    ],
)  # fmt: skip
def test_what_looks_like_a_credential_is_masked(text: str, masked: str) -> None:
    assert Mask()(text) == masked


def test_a_run_without_its_secrets_folder_is_masked_all_the_same(tmp_path: Path) -> None:
    assert mask_of(RunFolder(tmp_path / "gone"), {"A_TOKEN": "value-of-it"})("value-of-it") == MASK
