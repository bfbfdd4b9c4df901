"""Cleaning of foreign text: no secrets or people's names in command lines, no control characters in a terminal."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Sequence
from pathlib import PurePath

KEEP_VARIABLE = "XSP_KEEP_ARGUMENTS"
"""Environment variable: 1 keeps the values of arguments, except those whose names suggest a secret."""

_WORDS = (
    "token(?!iz)|secret|passw|passphrase|pwd|(?<![a-z])pass(?![a-z])|credential|[-_]key(?![a-z])|api[-_]?key|access[-_]?key"
    "|auth|cookie|jwt|bearer|(?<![a-z])sas(?![a-z])"
)
_SECRET = re.compile(rf"(?i)(?:{_WORDS})")
_HEADER = re.compile(rf"(?i)^([\w-]*(?:{_WORDS})[\w-]*:\s*)(?!//)\S.*")
_URL_CREDENTIALS = re.compile(r"(?i)(://)[^@\s]+@")
_TOKEN = re.compile(r"\b(?:hf_|sk-|gh[opsu]_|github_pat_|xox[abp]-|AKIA|ASIA|eyJ)[\w.-]{8,}")
_JSON_SECRET = re.compile(rf"(?i)([\"'][^\"']*(?:{_WORDS})[^\"']*[\"']\s*:\s*)(?:\"[^\"]*\"|'[^']*'|[^,}}\s]+)")
_QUERY = re.compile(r"(?i)([?&][^=&\s]*(?:token|secret|passw|key|sig|auth)[^=&\s]*=)[^&\s]+")
_BEFORE_PATH = r"(^-\w(?=/)|^|[=:,;'\"(\[]|file://)"
_HOME = re.compile(_BEFORE_PATH + r"/(?:home|Users)/[^/\s:,;'\"]+/?(?=$|[\s:,;'\"])")
_DIRECTORIES = re.compile(_BEFORE_PATH + r"/(?:[^/\s:,;'\"]+/)*(?=[^/\s:,;'\"])")
HIDDEN = "***"


_OPTION = re.compile(r"--[A-Za-z][\w.-]{0,60}|-[a-z]{1,3}|-[A-Za-z]")
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,60}")
_PLAIN = re.compile(
    r"(?i)[-+]?(\d{1,15}(\.\d*)?|\.\d+)(e[-+]?\d{1,3})?(%|[a-z]{1,3})?|\d{1,6}([x,]\d{1,6})*"
    r"|true|false|yes|no|on|off|none|null|auto|all|cpu|mps|(cuda|xpu|hip)(:\d+)?|b?float\d*|[bft][fp]\d+|u?int\d+|amp"
    r"|adamw?|sgd|lion|lamb|train|eval|test|cosine|linear|m(/l(/(op|g))?)?"
)
"""Numbers with units, shapes, switches, devices, types: values that contain no secret."""

_MODEL = re.compile(
    r"(?:(?:torchvision|timm|transformers|micro):[\w./-]{1,60}|(?i:resne|vgg|vit|bert|gpt|llama|swin|convnext|efficientnet"
    r"|mobilenet|densenet|inception|t5|unet|deit|squeezenet|alexnet)[\w.-]{0,40})"
)
_NAME_OPTIONS = ("--step", "--model", "--arch", "--net", "--backbone", "--levels", "--collectors")
_NAME_VALUE = re.compile(r"[A-Za-z_][\w.:/-]{0,60}")
"""Form of a name: the value of one of the options above is the name of a function, a model or a level."""

_COMMAND = re.compile(r"profile|run|sweep|serve|torchrun|accelerate|deepspeed|launch|python[\d.]*|pytest")


def command(argv: Sequence[str], keep: bool | None = None) -> list[str]:
    """Return a command line in a form that may be passed on.

    It keeps the program's name, the names of options, and values that are plainly a number, a switch, a device, a type
    or the name of a model. Every other value becomes `***`, whatever its option is called: secrets have many names.

    Args:
        argv: the program and its arguments.
        keep: keep other values too, except those whose names suggest a secret; by default, if the environment variable
            `KEEP_VARIABLE` is 1.
    """
    if keep is None:
        keep = os.environ.get(KEEP_VARIABLE) == "1"
    if keep:
        return _without_suspects(argv)
    if not argv:
        return []
    return [PurePath(argv[0]).name or argv[0], *map(_scrubbed, argv[1:], argv)]


def _scrubbed(argument: str, previous: str) -> str:
    """Return an argument without anything that may be a secret; `previous` is the preceding argument."""
    name, equals, value = argument.partition("=")
    is_option = _OPTION.fullmatch(name) is not None
    if equals:
        name_text = name if is_option or _NAME.fullmatch(name.lstrip("+")) else HIDDEN
        return f"{name_text}={value if not value or _is_name_option(name, value) or _is_plain(value) else HIDDEN}"
    if _is_name_option(previous, argument):
        return argument
    if is_option or argument in ("", "-", "--", HIDDEN) or _is_plain(argument) or _is_program(argument):
        return argument if not _is_program(argument) else PurePath(argument).name
    return f"{argument[:2]}{HIDDEN}" if re.match(r"-[A-Za-z]", argument) else HIDDEN


def _is_name_option(option: str, value: str) -> bool:
    """Return whether an option takes a name, and the value is a name."""
    return option in _NAME_OPTIONS and _NAME_VALUE.fullmatch(value) is not None and not _TOKEN.search(value)


def _is_plain(value: str) -> bool:
    return any(form.fullmatch(value) for form in (_PLAIN, _MODEL, _COMMAND))


def _is_program(part: str) -> bool:
    """Return whether an argument is the file of a program, as in `xsp run train.py` or `xsp profile own.py:build`."""
    file, _, function = PurePath(part).name.partition(":")
    is_function_name = not function or (_NAME.fullmatch(function) is not None and not _TOKEN.search(function))
    return file.endswith((".py", ".pyz")) and _NAME.fullmatch(file) is not None and is_function_name


def _without_suspects(argv: Sequence[str]) -> list[str]:
    """Return a command line without values that may be secrets, and with file names instead of absolute paths.

    It hides the values of options and headers whose name suggests a secret (`--api-key X`, `--token=X`,
    `Authorization: X`), credentials in URLs, tokens of well-known forms, the query of `--otlp`, and the directories of
    absolute paths, which often name a person.
    """
    cleaned: list[str] = []
    hide_next = False
    for argument, previous in zip(argv, ["", *argv], strict=False):
        if previous == "--otlp" or argument.startswith("--otlp="):
            argument = argument.partition("?")[0]
        if hide_next:
            cleaned.append(HIDDEN)
            hide_next = False
            continue
        name, equals, _ = argument.partition("=")
        if _SECRET.search(name) and (name.startswith("-") or equals):
            cleaned.append(f"{name}={HIDDEN}" if equals else argument)
            hide_next = not equals and name.startswith("-")
            continue
        argument = _JSON_SECRET.sub(rf'\g<1>"{HIDDEN}"', _TOKEN.sub(HIDDEN, argument))
        argument = _HEADER.sub(rf"\g<1>{HIDDEN}", _URL_CREDENTIALS.sub(rf"\g<1>{HIDDEN}@", argument))
        cleaned.append(_without_directories(_QUERY.sub(rf"\g<1>{HIDDEN}", argument)))
    return cleaned


def _without_directories(text: str) -> str:
    return _DIRECTORIES.sub(r"\g<1>", _HOME.sub(r"\g<1>~", text))


_SETTING = re.compile(rf"(?i)([\w.-]*(?:{_WORDS})[\w.-]*[\"']?\s*[=:]\s*)(\"[^\"]*\"?|'[^']*'?|[^\s,;)\]}}]+)")


def scrub_settings(text: str) -> str:
    """Return a text of settings, `in_features=8, api_key='x'`, without secrets and directories.

    It hides values whose name suggests a secret, unless they are plainly numbers or switches (`num_tokens=197`),
    credentials in URLs, and tokens of well-known forms.
    """
    cleaned = _SETTING.sub(lambda match: match[0] if _PLAIN.fullmatch(match[2]) else match[1] + HIDDEN, text)
    cleaned = _QUERY.sub(rf"\g<1>{HIDDEN}", _URL_CREDENTIALS.sub(rf"\g<1>{HIDDEN}@", _TOKEN.sub(HIDDEN, cleaned)))
    return _without_directories(cleaned)


# --- in a terminal ----------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Return text that cannot control a terminal: control characters and changes of direction become symbols."""
    return text if text.isprintable() else "".join(map(_printable, text))


def plain_lines(text: str) -> str:
    """Return text of several lines that cannot control a terminal, see `plain`."""
    return "\n".join(map(plain, text.split("\n")))


def _printable(character: str) -> str:
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))
    return (
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") else character
    )
