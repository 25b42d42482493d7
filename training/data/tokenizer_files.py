"""The files of a tokenizer folder, read by us: what they say, before any of it is a tokenizer.

`tokenizer.json` is the tokenizer; `tokenizer_config.json`, `special_tokens_map.json` and `chat_template.jinja` add its
named tokens and its template. A folder without `tokenizer.json` holds a slow tokenizer and is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from training.errors import TokenizerError

Json = dict[str, Any]

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens with a name; a template sees those that are set under these names."""

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What the files of a tokenizer folder say together."""

    raw: Json
    """tokenizer.json with every added token in it, and without what an earlier use left behind."""
    config: Json
    """tokenizer_config.json."""
    specials: dict[str, str]
    """Named special tokens that are set: `bos_token` to its text, and so on."""
    chat_template: str | None
    switched_off: tuple[str, ...]
    """What tokenizer.json carried over from an earlier use: truncation, padding, dropout."""


def read_tokenizer_files(folder: Path, template: Path | None) -> TokenizerFiles:
    """Read a tokenizer folder; `template` is a Jinja file used instead of the folder's own chat template.

    Raises:
        TokenizerError: the folder holds no fast tokenizer, or a file of it cannot be read.
    """
    config = _read_json(folder / "tokenizer_config.json") or {}
    raw = _read_fast(folder, config)
    switched_off = _switch_off(raw)
    _merge_added(raw, config)
    return TokenizerFiles(
        raw=raw,
        config=config,
        specials=_named({**(_read_json(folder / "special_tokens_map.json") or {}), **config}),
        chat_template=_chat_template(folder, config, template),
        switched_off=switched_off,
    )


def _read_fast(folder: Path, config: Json) -> Json:
    """tokenizer.json, or the refusal of a folder without one."""
    if not folder.is_dir():
        raise TokenizerError(f"tokenizer {folder} is not a folder; name the folder that holds tokenizer.json")
    raw = _read_json(folder / "tokenizer.json")
    if raw is None:
        held = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise TokenizerError(
            f"tokenizer {folder} is a slow one ({config.get('tokenizer_class', 'no class named')}): it holds {held}, "
            "but no tokenizer.json. Write its fast form with "
            f'`AutoTokenizer.from_pretrained("{folder}").save_pretrained(FOLDER)` and name that folder'
        )
    raw.setdefault("added_tokens", [])
    return raw


def _chat_template(folder: Path, config: Json, override: Path | None) -> str | None:
    """The template given, else chat_template.jinja, else the one (or the one called `default`) in the configuration."""
    file = override or folder / "chat_template.jinja"
    if override is not None or file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"chat template {file} cannot be read: {error}") from None
    stored: Any = config.get("chat_template")
    if isinstance(stored, list):
        named = {str(entry["name"]): str(entry["template"]) for entry in cast("list[Json]", stored)}
        if "default" not in named:
            raise TokenizerError(
                f"{folder} has chat templates {', '.join(sorted(named))} and none called default; write the one to use "
                "to a file and set `template` under [tokenizer] to it"
            )
        return named["default"]
    return None if stored is None else str(stored)


def _named(settings: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens that are set; a token may be written as its text or as an object with `content`."""
    texts = {name: settings.get(name) for name in NAMED}
    return {
        name: cast("Json", value)["content"] if isinstance(value, dict) else str(value)
        for name, value in texts.items()
        if value is not None
    }


def _merge_added(raw: Json, config: Json) -> None:
    """Take in the added tokens that only tokenizer_config.json declares.

    A special token is looked for in the text as it stands, so that no normalizer makes one out of other text.
    """
    known = {entry["content"] for entry in raw["added_tokens"]}
    for key, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            flags = {flag: bool(token.get(flag, False)) for flag in FLAGS}
            raw["added_tokens"].append({"id": int(key), "content": token["content"], **flags})
    for entry in raw["added_tokens"]:
        entry["normalized"] = entry["normalized"] and not entry["special"]


def _switch_off(raw: Json) -> tuple[str, ...]:
    """Clear what makes ids depend on an earlier use, or on chance; gives the names of what was on."""
    model = cast("Json", raw.get("model") or {})
    kept = [name for name in ("truncation", "padding") if raw.get(name) is not None]
    raw.update(dict.fromkeys(("truncation", "padding")))
    if model.get("dropout"):
        kept.append("dropout")
        model["dropout"] = None
    return tuple(kept)


def _read_json(path: Path) -> Json | None:
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds {type(value).__name__}, must hold a JSON object")
    return cast("Json", value)
