"""The line of the README that serves a model: both tested versions of vLLM answer a request over HTTP."""

import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from serving import engine, models
from serving.engine import RELEASE

ROOT = Path(__file__).parents[2]
TEST = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4", "--enforce-eager",
        "--served-model-name", "m")
DTYPE = "lowbit_k4v4"


def line(port: int, is_older: bool) -> list[str]:
    """The README's, for a model and a port of the test.

    0.32 knows no dtypes of others; its wheel for CPUs has no command ``vllm``, whose server is started by its module.
    """
    found, = (line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("    vllm serve MODEL"))
    _, serve, model, *words = shlex.split(found.replace("MODEL", str(models.smollm2())), comments=True)
    command = ["vllm.entrypoints.cli.main", serve, model]
    if is_older:
        at = words.index("--kv-cache-dtype")
        assert words[at + 1] == DTYPE
        del words[at : at + 2]
        command = ["vllm.entrypoints.openai.api_server", "--model", model]
    return [sys.executable, "-m", *command, *words, *TEST, "--port", str(port)]


def asked(port: int, path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=240) as answer:
        return json.loads(answer.read())


def served(tmp_path: Path, is_older: bool) -> dict:
    """What the server says of its version, and its text."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = engine.environment(None if is_older else RELEASE) | dict(LOWBIT_ATTN_VLLM=DTYPE,
                                                                        VLLM_ENABLE_V1_MULTIPROCESSING="1")
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(line(port, is_older), env=variables, cwd=tmp_path, stdout=log, stderr=log)
    try:
        while True:
            assert server.poll() is None, (tmp_path / "log").read_text()[-6000:]
            try:
                version = asked(port, "/version")["version"]
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(1)
        text = asked(port, "/v1/completions", dict(model="m", prompt="The capital of France is", max_tokens=8,
                                                   temperature=0))["choices"][0]["text"]
        return dict(vllm=version, text=text)
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_the_line_of_the_readme(tmp_path, measured, version):
    if version == "0.33" and not RELEASE.is_dir():
        pytest.skip(f"{RELEASE} is not there; .ci/serving makes it")
    measured |= served(tmp_path, version == "0.32")
    assert measured["vllm"].startswith(version) and "Paris" in measured["text"]
