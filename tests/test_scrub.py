"""What a run keeps of its command line: no secret, no person."""

from __future__ import annotations

import pytest

from xsp.run import Run
from xsp.scrub import HIDDEN, KEEP_VARIABLE, command, plain, scrub_settings


@pytest.mark.parametrize(
    "plain",
    [
        "train.py --epochs 3 --lr=1e-3 --amp --warmup 10% --shape 3x224x224",
        "xsp profile torchvision:resnet50 --levels M/L --batch-size 8",
        "xsp run train.py --device cuda:0 --dtype bf16",
        "train.py model=resnet50 ++opt.lr=0.1",
        "xsp run --step work --model my-net steps.py 0.1",
    ],
)
def test_of_a_command_line_is_kept_what_is_plainly_no_secret(plain: str) -> None:
    assert " ".join(command(plain.split())) == plain
    assert " ".join(command(f"/home/ada/work/{plain}".split())) == plain


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("--data /mnt/ada/sets/cats cats.csv", "--data *** ***"),
        ("--pwd X1 --pass X2 --passphrase X3", "--pwd *** --pass *** --passphrase ***"),
        ("--private-key X4", "--private-key ***"),
        ("--wandb_key=X --jwt=X --bearer X --sas X -p X", "--wandb_key=*** --jwt=*** --bearer *** --sas *** -p ***"),
        ("-pS3CRET -XPOST", "-p*** -X***"),
        ("http://ada:p/w@host/x hf_abcdefgh12 sk-abcdefgh12", "*** *** ***"),
        ("--model=hf_abcdefgh12 --model hf_abcdefgh12", "--model=*** --model ***"),
        ("HF_TOKEN=abc ghp_abcdefgh12 AKIAABCDEFGH12", "HF_TOKEN=*** *** ***"),
    ],
)
def test_every_other_value_is_hidden_whatever_its_option_is_called(given: str, kept: str) -> None:
    assert " ".join(command(["train.py", *given.split()])) == f"train.py {kept}"


def test_a_value_that_is_json_is_hidden_whole() -> None:
    assert command(["train.py", "--config", '{"token": "abc"}']) == ["train.py", "--config", HIDDEN]


def test_other_values_are_kept_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEEP_VARIABLE, "1")
    assert command(["train.py", "cats.csv", "--pwd", "X"]) == ["train.py", "cats.csv", "--pwd", HIDDEN]


@pytest.mark.parametrize(
    "secret",
    ["hf_abcdefgh12", "sk-abcdefgh12", "ghp_abcdefgh12", "AKIAABCDEFGH12", "eyJhbGciOi.eyJzdWIi.abc"],
)
def test_tokens_of_known_forms_are_hidden_wherever_they_stand(secret: str) -> None:
    assert secret not in str(command(["train.py", secret, f"--x={secret}", f'{{"a": "{secret}"}}'], keep=True))


def test_a_password_with_a_slash_and_one_in_json_are_hidden() -> None:
    assert command(["http://ada:p/w@host/x"], keep=True) == ["http://***@host/x"]
    assert "abc" not in str(command(['--config={"token": "abc"}', "{'password': 'abc'}"], keep=True))


def test_a_terminal_gets_signs_for_what_it_would_do() -> None:
    assert plain("a\x1b[2Jb\u202ec\x9bd") == "a␛[2Jb\ufffdc\ufffdd"
    assert Run.of({"a\n": ["b\x07", 5, None, {"c": "\x1b"}]}) == {"a␊": ["b␇", 5, None, {"c": "␛"}]}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("train.py --epochs 3 --lr=1e-3", "train.py --epochs 3 --lr=1e-3"),
        ("/home/ada/work/train.py --data /mnt/ada/sets/cats", "train.py --data cats"),
        ("--out=/home/ada/runs/x", "--out=x"),
        ("--api-key S3CRET --token=S3CRET -- --password S3CRET", "--api-key *** --token=*** -- --password ***"),
        ("--hf_token S3CRET HF_TOKEN=S3CRET", "--hf_token *** HF_TOKEN=***"),
        ("--AWS-Secret-Access-Key S3CRET", "--AWS-Secret-Access-Key ***"),
        ("https://ada:S3CRET@host/set.tar", "https://***@host/set.tar"),
        ("https://host/set.tar?sig=S3CRET&part=2&api_key=S3CRET", "https://host/set.tar?sig=***&part=2&api_key=***"),
        ("--url=https://ada:S3CRET@host/", "--url=https://***@host/"),
        ("s3://bucket/set --tokenizer bert", "s3://bucket/set --tokenizer bert"),
        ("-I/home/ada/include file:///home/ada/set", "-Iinclude file://set"),
        ("--cache /home/ada --cache=/Users/ada/", "--cache ~ --cache=~"),
        ("--roots /home/ada/a:/home/ada/b,/home/ada/c", "--roots a:b,c"),
    ],
)
def test_a_command_line_is_kept_without_secrets_and_directories(given: str, kept: str) -> None:
    assert " ".join(command(given.split(), keep=True)) == kept


def test_headers_do_not_give_their_secret_away() -> None:
    kept = command(
        ["--header", "Authorization: Bearer S3CRET", "-H", "X-Api-Key: S3CRET", "-H", "Accept: text/html"], keep=True
    )
    assert kept == ["--header", "Authorization: ***", "-H", "X-Api-Key: ***", "-H", "Accept: text/html"]


def test_no_secret_is_no_secret() -> None:
    assert command([]) == []
    assert command(["", "/", "a=b=c", "--flag="], keep=True) == ["", "/", "a=b=c", "--flag="]
    assert command(["--token"]) == ["--token"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("8, 4, bias=True", "8, 4, bias=True"),
        ("num_tokens=197, key_dim=64, pad_token_id=None", "num_tokens=197, key_dim=64, pad_token_id=None"),
        ("api_key='S3 CRET', b=1", "api_key=***, b=1"),
        ("{'password': 'S3CRET'}", "{'password': ***}"),
        ("url=https://ada:S3CRET@host/x?sig=S3CRET", "url=https://***@host/x?sig=***"),
        ("hub=hf_abcdefghijkl file='/home/ada/a/b.bin'", "hub=*** file='b.bin'"),
    ],
)
def test_a_text_of_settings_is_kept_without_secrets_and_directories(given: str, kept: str) -> None:
    assert scrub_settings(given) == kept
