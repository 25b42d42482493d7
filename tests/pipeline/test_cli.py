"""The command line: what is refused, in which words and with which exit code; what help costs."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.cli import COMMANDS, main, parsers

ROOT = Path(__file__).parents[2]


def code_of(argv: list[str]) -> int:
    """The exit code, whether it is returned or the process is ended with it."""
    try:
        return main(argv)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["prepar", "x.jsonl"], ["no command 'prepar'", "did you mean prepare"]),
        (["prepare", "x", "--tokeniser", "t", "--out", "o"], ["no option --tokeniser", "did you mean --tokenizer"]),
        (["prepare", "x", "--tokenizer", "t", "--out", "o", "--overflow", "dorp"], ["'dorp'", "did you mean drop"]),
        (["ledger", "qurey", "select 1"], ["'qurey'", "did you mean query"]),
        (["prepare", "x", "--out", "o"], ["required", "--tokenizer"]),
        (["plan", "d", "--pairs-per-step", "many", "--pack-tokens", "64"], ["--pairs-per-step", "'many'"]),
        (["inspect", "d", "--row", "1", "--pair", "p"], ["not allowed with"]),
        (["ledger", "query"], ["required: SQL"]),
        (["ledger", "query", "select 1", "--stroe", "s"], ["no option --stroe", "did you mean --store"]),
        (["--verison"], ["no option --verison", "did you mean --version"]),
        ([], ["required: COMMAND"]),
    ],
)
def test_usage_errors_exit_2_and_name_what_is_near(argv: list[str], said: list[str], capsys) -> None:
    assert code_of(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for words in [*said, "--help"]:
        assert words in captured.err


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["train", "--config", "no.toml"], 2, "no.toml: there is no such configuration file"),
        (["plan", "d", "--pairs-per-step", "0", "--pack-tokens", "64"], 2, "plan.pairs_per_step = 0"),
        (
            ["plan", "d", "--pairs-per-step", "4", "--pack-tokens", "65", "--cp", "2"],
            2,
            "--pack-tokens 65 is no multiple of 4",
        ),
        (["plan", "d", "--pairs-per-step", "4", "--pack-tokens", "64", "--dp", "0"], 2, "--dp 0"),
        (["inspect", "no-such-folder"], 3, "no-such-folder"),
        (["diff", "no-such-folder", "no-such-folder"], 3, "no-such-folder"),
        (["report", "run-1", "--out", "r.html"], 1, "0 runs named run-1"),
        (["ui", "--port", "99999"], 2, "--port 99999"),
    ],
)
def test_faults_are_one_sentence_and_the_code_of_their_kind(
    argv: list[str], code: int, said: str, capsys, monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_of(argv) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith(f"pairledger {argv[0]}: ")
    assert captured.err.count("\n") == 1


def test_help_shows_at_once_and_imports_nothing_heavy() -> None:
    heavy = "torch transformers dagster pyarrow duckdb pydantic numpy rich".split()
    script = f"import sys\nfrom pipeline.cli import parsers\nparsers()\nprint([n for n in {heavy} if n in sys.modules])"
    best = 9.0
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
        best = min(best, time.perf_counter() - began)
    assert done.stdout.strip() == "[]"
    assert best < 0.5


def test_every_command_shows_an_example_of_itself() -> None:
    top, own = parsers()
    assert len(own) == len(COMMANDS) == 10
    for name, parser in own.items():
        assert name in top.format_help()
        assert f"  pairledger {name}" in parser.format_help().partition("example:\n")[2]


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for name, parser in parsers()[1].items():
        section = re.search(rf"^## `{name}`\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        assert section, f"docs/cli.md has no section `{name}`"
        for option in parser.options - {"-h", "--help"}:
            assert f"`{option}" in section[1], f"docs/cli.md does not name {option} of {name}"


def test_a_reader_that_goes_away_is_no_traceback(tmp_path) -> None:
    command = [sys.executable, "-m", "pipeline.cli", "ledger", "query", "--json", "select * from range(100000)"]
    env = {**os.environ, "PAIRLEDGER_STORE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.parametrize(("argv", "out"), [(["--version"], "pairledger 0."), (["train", "--help"], "RUN.toml")])
def test_help_and_version_exit_0(argv: list[str], out: str, capsys) -> None:
    assert code_of(argv) == 0
    assert out in capsys.readouterr().out
