"""Nothing that a job says holds a secret of it."""

from pathlib import Path

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
