"""Nothing that a job says holds a secret of it."""

import io
import logging
from pathlib import Path

import pytest
import structlog

from app.log import configure
from worker.redaction import Redactor


def test_values_are_replaced_wherever_they_stand() -> None:
    redactor = Redactor(["hf_TESTTOKEN123", "hf_TESTTOKEN123456"])
    said = {"a hf_TESTTOKEN123": ["hf_TESTTOKEN123456 and hf_TESTTOKEN123", 1, None], "b": {"c": "clean"}}
    assert redactor.plain(said) == {"a ***": ["*** and ***", 1, None], "b": {"c": "clean"}}


def test_only_files_of_the_patterns_are_rewritten(tmp_path: Path) -> None:
    for name in ("trainer.log", "sub/error.json", "weights.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x hf_TESTTOKEN123 \xff\n")
    Redactor(["hf_TESTTOKEN123"]).clean(tmp_path, "*.log", "*.json")
    assert (tmp_path / "trainer.log").read_bytes() == b"x *** \xff\n"
    assert (tmp_path / "sub/error.json").read_bytes() == b"x *** \xff\n"
    assert b"hf_" in (tmp_path / "weights.safetensors").read_bytes()
    assert len(list(tmp_path.rglob("*.*"))) == 3


TOKENS = [
    "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567",
    "sk-ty-" + "a1-_" * 10,
    "sk-proj-" + "Zz9" * 16,
    "ghp_" + "a1B2" * 9,
    "github_pat_" + "11AB_" * 12,
    "glpat-" + "x-9_" * 5,
    "AKIA" + "ABCD1234" * 2,
    "AIza" + "b" * 35,
    "dapi" + "0123456789abcdef" * 2 + "-2",
    "whsec_" + "QUJD" * 8,
    "wandb_v1_" + "k3y" * 10,
]


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("around", ["{}", "token={} and more", '{{"key": "{}"}}', "https://x.org/?k={}&y=1", "[rank0]: '{}'"])
def test_whatever_looks_like_a_token_is_masked_though_nobody_named_it(token: str, around: str) -> None:
    assert Redactor().text(around.format(token)) == around.format("***")
    assert Redactor(tokens=False).text(around.format(token)) == around.format(token)


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("Authorization: Bearer abcdefghijklmnop.qrs-tuv=", "Authorization: Bearer ***"),
        ("postgresql://me:pa55@db.internal/tuneyard", "postgresql://***@db.internal/tuneyard"),
        ("https://oauth2:tok@git.internal/a/b", "https://***@git.internal/a/b"),
        ("WANDB_API_KEY=" + "0af" * 14 + " python", "WANDB_API_KEY=*** python"),
        ("AWS_SECRET_ACCESS_KEY=" + "ab/+" * 10, "AWS_SECRET_ACCESS_KEY=***"),
    ],
)
def test_what_stands_where_a_token_stands_is_masked(said: str, left: str) -> None:
    assert Redactor().text(said) == left


@pytest.mark.parametrize(
    "said",
    [
        "task-specific risk-averse-and-long-enough-word hf_model sk-learn",
        "ftjob-4fGkAbCdEfGhIjKlMnOpQrSt file-4fGkAbCdEfGhIjKlMnOpQrSt ft:openai/gpt-oss-20b:team::abc",
        "https://huggingface.co/openai/gpt-oss-20b at 10:32:11, mail me@example.org",
        "a bearer of news",
        "sha256 " + "0123456789abcdef" * 4,
    ],
)
def test_what_only_resembles_a_token_stays(said: str) -> None:
    assert Redactor().text(said) == said


def logged(text: bytes, *values: str) -> bytes:
    target = io.BytesIO()
    Redactor(values).copy_log(io.BytesIO(text), target)
    return target.getvalue()


def test_a_log_loses_values_and_tokens() -> None:
    log = b"key hf_TESTTOKEN123 \xff\nother " + TOKENS[0].encode() + b"\n"
    assert logged(log, "hf_TESTTOKEN123") == b"key *** \xff\nother ***\n"


def test_a_progress_bar_is_one_line_however_often_it_was_drawn() -> None:
    bar = b"".join(b"\rLoading: %3d%%|####|" % (part // 100) for part in range(10_001))
    assert logged(b"before\n" + bar + b"\nafter\n") == b"before\nLoading: 100%|####|\nafter\n"
    assert logged(bar) == b"Loading: 100%|####|"  # while it is still drawn
    assert logged(bar + b"\r") == b"Loading: 100%|####|"
    assert logged(b"one\r\ntwo\r\n") == b"one\ntwo\n"


def test_lines_that_were_whole_stay_where_they_are_while_the_log_grows() -> None:
    log = b"a\rb\n" + TOKENS[0].encode() + b"\nc\rd"
    grown = log + b"\re\nf\n"
    whole = logged(log)[: logged(log).rfind(b"\n") + 1]
    assert logged(grown).startswith(whole)


def test_the_service_logs_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure()
        logging.getLogger("x").warning("got %s", TOKENS[0], extra={"more": TOKENS[1]})
        structlog.get_logger().error("failed", url="postgresql://me:pa55@db/x", exc_info=ValueError(TOKENS[2]))
    finally:
        root.handlers[:], root.level = before
        structlog.reset_defaults()
    said = capsys.readouterr().err
    assert said.count("***") >= 3
    assert not [secret for secret in (*TOKENS, "pa55") if secret in said]
