"""What a run keeps of its command line: no secret, no person."""

from __future__ import annotations

import pytest

from xsp.scrub import command


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
    assert " ".join(command(given.split())) == kept


def test_headers_do_not_give_their_secret_away() -> None:
    kept = command(["--header", "Authorization: Bearer S3CRET", "-H", "X-Api-Key: S3CRET", "-H", "Accept: text/html"])
    assert kept == ["--header", "Authorization: ***", "-H", "X-Api-Key: ***", "-H", "Accept: text/html"]


def test_no_secret_is_no_secret() -> None:
    assert command([]) == []
    assert command(["", "/", "a=b=c", "--flag="]) == ["", "/", "a=b=c", "--flag="]
    assert command(["--token"]) == ["--token"]
