"""Loading a tokenizer: what its files say, what is switched off, what is refused, and what its fingerprint sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from tests.training.data import tiny
from training.data.controls import Run
from training.data.tokenizer import load_tokenizer
from training.errors import IdentityError, TokenizerError


def test_named_tokens_and_the_end_of_a_turn_are_found(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, tiny.byte_level(), tiny.CHATML, bos_token=None, pad_token="<|endoftext|>")
    tokenizer = load_tokenizer(folder)
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.specials == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (
        None,
        raw.token_to_id("<|im_end|>"),
        raw.token_to_id("<|endoftext|>"),
    )
    assert tokenizer.end_of_turn == "<|im_end|>"
    assert tokenizer.vocab_size == raw.get_vocab_size()
    assert tokenizer.controls.ids == {raw.token_to_id(token) for token in tiny.SPECIAL}


def test_without_a_padding_token_the_end_token_pads(tmp_path: Path) -> None:
    """Case: pad-is-eos (the padding id may be the end token's: no mask looks at it)."""
    tokenizer = load_tokenizer(tiny.write(tmp_path, tiny.byte_level()))
    assert tokenizer.pad_id == tokenizer.eos_id is not None


def test_what_an_earlier_use_left_behind_is_switched_off_and_named(tmp_path: Path) -> None:
    """Case: leaked-truncation; a dropout would make ids a matter of chance."""
    text = "one two three four five six seven"
    clean, used = tiny.byte_level(), tiny.byte_level()
    used.enable_truncation(8)
    used.enable_padding(length=8)
    used.model.dropout = 0.9
    before = load_tokenizer(tiny.write(tmp_path / "clean", clean))
    after = load_tokenizer(tiny.write(tmp_path / "used", used))
    raw = Tokenizer.from_file(str(tmp_path / "used" / "tokenizer.json"))
    assert len(raw.encode(text).ids) == 8, "the file carries the limit"
    full = clean.encode(text, add_special_tokens=False).ids
    assert len(full) > 8
    assert before.encode([Run(text)]) == after.encode([Run(text)]) == [full]
    assert (before.switched_off, after.switched_off) == ((), ("truncation", "padding", "dropout"))
    assert before.fingerprint == after.fingerprint


def test_the_same_files_elsewhere_are_the_same_tokenizer_and_one_more_token_makes_another(tmp_path: Path) -> None:
    """Vector 22; case: path-in-key."""
    folders = [
        tiny.write(tmp_path / "a", tiny.byte_level(), tiny.CHATML, name_or_path="/here", tokenizer_file="/here/t.json"),
        tiny.write(tmp_path / "b", tiny.byte_level(), tiny.WITH_BOS, name_or_path="/there", chat_template_file="x"),
    ]
    one, other = (load_tokenizer(folder) for folder in folders)
    assert one.fingerprint == other.fingerprint
    grown = tiny.byte_level()
    grown.add_tokens(["newtoken"])
    renamed = tiny.write(tmp_path / "d", tiny.byte_level(), eos_token="</s>")
    setting = tiny.write(tmp_path / "e", tiny.byte_level(), add_bos_token=True)
    others = {load_tokenizer(f).fingerprint for f in (tiny.write(tmp_path / "c", grown), renamed, setting)}
    assert len({one.fingerprint, *others}) == 4


def test_the_fingerprint_does_not_depend_on_process_or_use(tmp_path: Path) -> None:
    """Case: tokenizer-state-in-key."""
    folder = tiny.write(tmp_path, tiny.byte_level(adds_bos=True), tiny.CHATML)
    tokenizer = load_tokenizer(folder)
    tokenizer.encode([Run("some text"), Run("<|im_end|>", plain=True)])
    tokenizer.check_unchanged()
    code = f"from training.data.tokenizer import load_tokenizer; print(load_tokenizer({str(folder)!r}).fingerprint)"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout.decode()
        for seed in ("1", "2")
    }
    assert printed == {tokenizer.fingerprint + "\n"}


def test_loading_and_rendering_need_no_torch(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, tiny.byte_level(), tiny.CHATML)
    code = (
        "import sys; from training.data.tokenizer import load_tokenizer; from training.data.recipe import make_recipe; "
        f"make_recipe(load_tokenizer({str(folder)!r})); print('jinja2' in sys.modules, 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"True False\n"


@pytest.mark.parametrize("change", ["token", "special", "truncation", "padding", "encode_special_tokens"])
def test_a_tokenizer_changed_in_memory_is_noticed(tmp_path: Path, change: str) -> None:
    tokenizer = load_tokenizer(tiny.write(tmp_path, tiny.byte_level()))
    tokenizer.check_unchanged()
    backend = tokenizer.backend
    match change:
        case "token":
            backend.add_tokens(["newtoken"])
        case "special":
            backend.add_special_tokens(["<think>"])
        case "truncation":
            backend.enable_truncation(4)
        case "padding":
            backend.enable_padding(length=4)
        case _:
            backend.encode_special_tokens = True
    with pytest.raises(IdentityError, match="was (changed in memory|switched on) after it was"):
        tokenizer.check_unchanged()


def test_a_change_to_the_continuation_alone_is_noticed(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny.write(tmp_path, tiny.metaspace()))
    tokenizer.check_unchanged()
    assert tokenizer.continuation is not tokenizer.backend
    tokenizer.continuation.enable_truncation(4)
    with pytest.raises(IdentityError, match="was changed in memory after it was fingerprinted"):
        tokenizer.check_unchanged()


def test_a_slow_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    with pytest.raises(TokenizerError, match=r"slow one \(BertTokenizer\).*vocab\.txt.*no tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json cannot be read"),
        ("tokenizer.json", "[]", r"tokenizer\.json holds list, must hold a JSON object"),
        ("tokenizer.json", '{"version": "1.0"}', r"tokenizer\.json cannot be loaded"),
        ("tokenizer_config.json", '{"eos_token": "<nowhere>"}', "eos_token '<nowhere>' is not in the vocabulary"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "chat template, line 1"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": ""}]}', "templates rag and none"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"7": {"content": "<new>", "special": true}}}',
            "'<new>' is declared with id 7, but the vocabulary gives it",
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder = tiny.write(tmp_path, tiny.byte_level())
    (folder / name).write_text(text)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(folder)


def test_no_folder_and_no_template_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="nowhere is not a folder"):
        load_tokenizer(tmp_path / "nowhere")
    folder = tiny.write(tmp_path / "t", tiny.byte_level())
    with pytest.raises(TokenizerError, match=r"chat template .*x\.jinja cannot be read"):
        load_tokenizer(folder, tmp_path / "x.jinja")


def test_the_template_given_comes_before_the_file_and_the_file_before_the_configuration(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, tiny.byte_level(), "from configuration")
    assert load_tokenizer(folder).chat_template == "from configuration"
    (folder / "chat_template.jinja").write_text("from file")
    assert load_tokenizer(folder).chat_template == "from file"
    (tmp_path / "own.jinja").write_text("given")
    assert load_tokenizer(folder, tmp_path / "own.jinja").chat_template == "given"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert load_tokenizer(tiny.write(tmp_path / "n", tiny.byte_level(), chat_template=named)).chat_template == "d"


def test_tokens_that_only_the_configuration_declares_are_added(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    size = backend.get_vocab_size()
    declared = {str(size): {"content": "<new>", "special": True}}
    tokenizer = load_tokenizer(tiny.write(tmp_path, backend, added_tokens_decoder=declared))
    assert tokenizer.encode([Run("a<new>")]) == [[backend.token_to_id("a"), size]]
    assert size in tokenizer.controls.ids


def test_a_named_token_and_a_templates_end_are_control_tokens_though_not_flagged(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    backend.add_tokens([AddedToken("<|eot|>"), AddedToken("<|eos|>")])
    template = "{% for m in messages %}{{ m.content }}<|eot|>{% endfor %}"
    tokenizer = load_tokenizer(tiny.write(tmp_path, backend, template, eos_token="<|eos|>"))
    ids = {backend.token_to_id(text) for text in ("<|eot|>", "<|eos|>")}
    assert tokenizer.end_of_turn == "<|eot|>"
    assert ids < tokenizer.controls.ids
    for text in ("a<|eot|>b", "a<|eos|>b"):
        marked, plain = tokenizer.encode([Run(text), Run(text, plain=True)])
        assert marked is not None and plain is not None
        assert len(ids & set(marked)) == 1 and ids.isdisjoint(plain)
        assert backend.decode(plain, skip_special_tokens=False) == text


def test_a_control_token_that_the_vocabulary_itself_knows_is_spelled_or_refused(tmp_path: Path) -> None:
    """A word-level vocabulary holds `</s>` as a word; parted after its first character it is two unknown words."""
    tokenizer = load_tokenizer(tiny.write(tmp_path, tiny.words(["a", "</s>"]), eos_token="</s>"))
    word, unknown = 1, 0
    assert tokenizer.encode([Run("a </s>"), Run("a </s>", plain=True)]) == [[word, 2], [word, unknown, unknown]]
    only = tiny.words(["<", "/s>", "</s>"])
    only.pre_tokenizer = pre_tokenizers.Split("x", "removed")
    single = tiny.write(tmp_path / "single", only, eos_token="<")
    assert load_tokenizer(single).encode([Run("<", plain=True)]) == [None]


def test_a_unigram_vocabulary_spells_its_end_token_and_may_answer_unknown(tmp_path: Path) -> None:
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -2.0) for letter in "a</s>")]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    backend.add_special_tokens(["<unk>", "</s>"])
    assert backend.encode("a</s>").ids == [2, 1]
    tokenizer = load_tokenizer(tiny.write(tmp_path, backend, eos_token="</s>"))
    assert tokenizer.encode([Run("a</s>", plain=True), Run("q", plain=True)]) == [[2, 3, 4, 5, 6], [0]]


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_metaspace_puts_no_blank_before_a_continuation(tmp_path: Path, scheme: str) -> None:
    tokenizer = load_tokenizer(tiny.write(tmp_path, tiny.metaspace(scheme)))
    never = tiny.metaspace(scheme)
    never.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    text = "The Ebro. The Tajo."
    start, goes_on = tokenizer.encode([Run(text, start=True), Run(text)])
    assert start == tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.backend.id_to_token((start or [0])[0]).startswith("▁")
    assert goes_on == never.encode(text, add_special_tokens=False).ids != start


def test_prefixes_of_the_other_makes_stay_away_from_a_continuation(tmp_path: Path) -> None:
    spaced = load_tokenizer(tiny.write(tmp_path / "b", tiny.byte_level(prefix_space=True)))
    bare = tiny.byte_level(prefix_space=True)
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert spaced.encode([Run("answer", start=True), Run("answer")]) == [
        bare.encode(" answer").ids,
        bare.encode("answer").ids,
    ]
    older = load_tokenizer(tiny.write(tmp_path / "p", tiny.prepending()))
    first, goes_on = older.encode([Run("answer is", start=True), Run("answer is")])
    assert "".join(older.backend.id_to_token(i) for i in first or []) == "▁answer▁is"
    assert "".join(older.backend.id_to_token(i) for i in goes_on or []) == "answer▁is"


def test_a_normalizer_cannot_make_a_control_token_out_of_other_text(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("<stop>", normalized=True)])
    folder = tiny.write(tmp_path, backend)
    stop = backend.token_to_id("<stop>")
    assert stop in Tokenizer.from_file(str(folder / "tokenizer.json")).encode("<STOP>").ids, "the file as it is would"
    assert stop not in (load_tokenizer(folder).encode([Run("<STOP>")])[0] or [stop])
    assert load_tokenizer(folder).encode([Run("<stop>")]) == [[stop]]


def test_the_configuration_alone_may_be_missing(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, tiny.byte_level())
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.specials, tokenizer.chat_template) == ({"eos_token": "</s>"}, None)
