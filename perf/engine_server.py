"""The line of the README that serves a model, as it is written: one request over HTTP, one line of JSON.

    python3 perf/engine_server.py FOLDER --output engine_server.jsonl       a model's folder, on a GPU

Starts `vllm serve FOLDER ...` of README.md with no other argument, waits until /health answers, asks /v1/completions
for tokens behind a prompt, and ends the server with all of its processes. The line has question and answer, versions,
seconds until the server answered, and what failed if something did.
"""

import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated

import engine
import typer
from provenance import ROOT, provenance

LINE = "    vllm serve MODEL"
ADDRESS = "http://127.0.0.1:8000"  # vLLM's own
QUESTION = "The capital of France is"
PACKAGES = ("vllm", "torch", "transformers", "lowbit_attn")


def command(model: Path, readme: Path = ROOT / "README.md") -> list[str]:
    """The words of the README's line, for a model's folder."""
    found, = (line for line in readme.read_text().splitlines() if line.startswith(LINE))
    return [str(model) if word == "MODEL" else word for word in shlex.split(found, comments=True)]


def asked(address: str, body: dict | None = None, seconds: float = 60.0) -> str:
    """What the server answers: to a body, or to a plain question for a page."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return answer.read().decode()


def wait_for(server: subprocess.Popen, address: str, seconds: float) -> None:
    """Until the server answers; RuntimeError if it ends before, TimeoutError if it takes longer."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            asked(address, seconds=5.0)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise TimeoutError(f"no answer after {seconds:.0f} s")


def exchange(words: list[str], model: Path, log, seconds: float, address: str = ADDRESS) -> dict:
    """Start the server, ask it once, end it; what the line says of that."""
    began = time.monotonic()
    with engine.group(words, os.environ | engine.MULTICAST_OFF | dict(HF_HUB_OFFLINE="1"), stdout=log,
                      stderr=log) as server:
        wait_for(server, f"{address}/health", seconds)
        started = time.monotonic()
        body = dict(model=str(model), prompt=QUESTION, max_tokens=24, temperature=0)
        answer = json.loads(asked(f"{address}/v1/completions", body))
        return dict(start_s=round(started - began, 1), answer_s=round(time.monotonic() - started, 3), question=QUESTION,
                    answer=answer["choices"][0]["text"], tokens=answer["usage"]["completion_tokens"],
                    server=json.loads(asked(f"{address}/version"))["version"])


def main(
    model: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a model with weights.")],
    output: Annotated[Path, typer.Option(help="JSON lines, appended to.")] = Path("engine_server.jsonl"),
    seconds: Annotated[float, typer.Option(help="To wait for the server, at most.")] = 200.0,
) -> None:
    """Serve and ask once; 0 if an answer came, else 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server's processes end with this one
    words = command(model)
    about = dict(part="server", command=shlex.join(words).replace(str(model), model.name), model=model.name,
                 versions={name: importlib.metadata.version(name) for name in PACKAGES}) | provenance()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            engine.write(output, about | exchange(words, model, log, seconds))
        except (OSError, RuntimeError, KeyError) as error:
            log.seek(0)
            engine.write(output, about | dict(error=f"{type(error).__name__}: {error}", told=log.read()[-1500:]))
            sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
